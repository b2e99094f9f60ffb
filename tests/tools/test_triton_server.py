"""The parts of tools/triton_server.py that need no Triton; `make triton` runs the rest."""

import ast
import json
import re
import sys
import sysconfig
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from minillm.deploy.ports import free_ports
from tests.project.makefile import ROOT, commands
from tools import triton_server

PYTHON = sysconfig.get_python_version()


@pytest.fixture
def build(monkeypatch, tmp_path):
    """An environment that has Triton's files, all of them empty."""
    monkeypatch.setattr(triton_server, "BUILD", tmp_path)
    server = tmp_path / f"venv/lib/python{PYTHON}/site-packages/pytriton/tritonserver"
    for name in ("backends/python/libtriton_python.so", f"python_backend_stubs/{PYTHON}/triton_python_backend_stub"):
        (server / name).parent.mkdir(parents=True)
        (server / name).touch()
    return tmp_path


def test_make_triton_installs_it_outside_of_our_environment():
    lines = commands("triton", "--assume-new=tools/triton/requirements.txt", "ARGS=--record x")
    assert any("build/triton/venv/bin/python -m pip install" in line for line in lines)
    assert lines[-1].endswith("tools/triton_server.py --record x")


def test_without_triton_the_script_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(triton_server, "BUILD", tmp_path)
    with pytest.raises(SystemExit, match="make triton"):
        triton_server.triton_folder()


def test_the_repository_is_written_anew_with_every_model(build):
    for _ in range(2):
        command, environment, folder = triton_server.triton_command(1, 2)
        (build / "models" / "left_over").mkdir()
    triton_server.triton_command(1, 2)
    models = build / "models"
    names = {path.name for path in models.iterdir()}
    assert names == {"in_flight", "batched", "tokenize", "detokenize", "ensemble"}
    assert all((models / name / "1").is_dir() and (models / name / "config.pbtxt").is_file() for name in names)
    steps = re.findall(r'model_name: "(\w+)"', (models / "ensemble" / "config.pbtxt").read_text())
    assert steps == ["tokenize", "in_flight", "detokenize"]
    stub = folder / "pytriton/tritonserver/backends/python/triton_python_backend_stub"
    assert stub.resolve().parent.name == PYTHON
    assert f"--model-repository={models}" in command and "--http-port=1" in command
    assert environment["MINILLM_PATH"].startswith(str(ROOT))


@pytest.mark.parametrize("model", ["in_flight", "batched", "tokenize", "detokenize"])
def test_a_model_reads_and_writes_only_tensors_of_its_configuration(model):
    folder = ROOT / "tools" / "triton" / "models" / model
    named = set(re.findall(r'name: "(\w+)"', (folder / "config.pbtxt").read_text()))
    source = ast.parse((folder / "1" / "model.py").read_text())
    words = {node.value for node in ast.walk(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert named <= words, "a tensor of the configuration is not used"


def test_a_server_that_ends_at_once_is_reported_with_its_log(build):
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(1)"]
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with (
        pytest.raises(SystemExit, match="no such model"),
        triton_server.started("triton", url, command, {}, Path(build)),
    ):
        pytest.fail("it counted as ready")


def test_servers_take_turns_and_each_gets_every_request(monkeypatch):
    asked: list[tuple[str, int]] = []

    class Echo(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, body["max_tokens"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    monkeypatch.setattr(triton_server, "REQUESTS", 4)
    monkeypatch.setattr(triton_server, "REPEAT", 1)
    server = HTTPServer(("127.0.0.1", 0), Echo)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        rows = triton_server.measure({name: (f"{url}/{name}", {}) for name in ("a", "b")})
    finally:
        server.shutdown()
        server.server_close()
    paths = [path for path, _ in asked]
    assert paths == [*["/a/generate"] * 4, *["/b/generate"] * 4] * 2
    assert sorted(tokens for _, tokens in asked[:4]) == sorted(triton_server.LENGTHS)
    assert [row["engine"] for row in rows] == ["a", "b"] and rows[0]["output_tokens"] == sum(triton_server.LENGTHS)
    assert [len(row["runs"]) for row in rows] == [1, 1], "the first round does not count"
