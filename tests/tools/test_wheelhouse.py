"""What learners read who install from a folder of wheels."""

import platform
import sys
from pathlib import Path

import pytest

from tools import wheelhouse


def test_instructions_name_the_python_that_the_wheels_need():
    text = wheelhouse.instructions("wheels")
    major, minor = sys.version_info[:2]
    assert f"with Python {major}.{minor}." in text.replace("\n", " ")
    assert platform.machine() in text and "{" not in text
    assert '--no-index --find-links wheels "minillm[course]"' in text


def test_the_folders_name_is_known_for_any_way_to_write_it(tmp_path, monkeypatch):
    monkeypatch.setattr(wheelhouse, "collect", lambda folder, torch_index: None)
    (tmp_path / "wheels").mkdir()
    monkeypatch.chdir(tmp_path / "wheels")
    monkeypatch.setattr("sys.argv", ["wheelhouse.py", "."])
    wheelhouse.main()
    assert "--find-links wheels " in Path("INSTALL.txt").read_text(encoding="utf-8")


def test_no_test_tools_are_collected():
    names = {line.split(">")[0].split("[")[0] for line in wheelhouse.wanted()}
    assert {"torch", "jupyterlab", "fastapi", "transformers"} <= names
    assert not {"pytest", "ruff", "minillm", "lm-eval"} & names


@pytest.mark.parametrize("size, stopped", [(10, False), (1000, True)])
def test_a_folder_with_a_build_for_gpus_is_reported(size, stopped, tmp_path, monkeypatch):
    monkeypatch.setattr(wheelhouse, "collect", lambda folder, torch_index: None)
    monkeypatch.setattr(wheelhouse, "megabytes", lambda folder: size)
    monkeypatch.setattr("sys.argv", ["wheelhouse.py", str(tmp_path)])
    if stopped:
        with pytest.raises(SystemExit, match="is torch a build for GPUs"):
            wheelhouse.main()
    else:
        wheelhouse.main()
