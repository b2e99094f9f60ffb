"""The Dockerfile's steps, without running them: `python tools/docker_steps.py` does."""

import socket

import pytest

from tests.project.makefile import ROOT
from tools import docker_steps


def test_all_steps_of_the_dockerfile_are_known():
    found = docker_steps.steps((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert {name for name, _ in found} == {"FROM", "WORKDIR", "COPY", "ARG", "RUN", "EXPOSE", "CMD"}
    assert ("EXPOSE", str(docker_steps.PORT)) in found


def test_another_server_at_the_port_is_not_taken_for_ours(monkeypatch, tmp_path):
    """JupyterLab would take the next port, and the other server would answer."""
    with socket.create_server(("", 0)) as other:
        monkeypatch.setattr(docker_steps, "PORT", other.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            docker_steps.answers(["false"], tmp_path, {})
