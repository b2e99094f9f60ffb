"""A small server that answers as the Hugging Face Hub does, as far as its library asks it when a model is fetched."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from minillm.errors import ConfigError
from minillm.pretrained.hub import snapshot

NAME = "good-people/Tiny_Model.v1"
TEXT = ["The river Ama runs past the old mill, and the miller's daughter doesn't swim in it."] * 3
OTHERS = {
    "README.md": b"# A model",
    "model.gguf": b"GGUF",
    "pytorch_model.bin": b"pickled",
    "flax_model.msgpack": b"packed",
    "onnx/model.onnx": b"onnx",
    "consolidated.safetensors": b"of another program",
    "original/consolidated.safetensors": b"of another program",
    "training_args.json": b"{}",
}
LARGE = (".safetensors", ".bin", ".gguf")  # files that the Hub keeps at another host
TOKEN = "hf_of_a_reader"


@dataclass
class Repository:
    """revisions: the name of a branch or tag -> its commit; files: a commit -> the files in it."""

    revisions: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files to a branch."""
        commit = hashlib.sha1(repr((branch, sorted(files.items()))).encode()).hexdigest()
        self.files[commit] = dict(files)
        self.revisions[branch] = commit
        return commit


class Hub(ThreadingHTTPServer):
    """repositories: by their names. asked: each request, as "GET /path". breaks: paths whose body ends half-way."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories: dict[str, Repository] = {}
        self.asked: list[str] = []
        self.tokens: dict[str, str | None] = {}  # the token that came with a path
        self.answer: tuple[int, dict[str, str], bytes] | None = None  # instead of all others
        self.breaks: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def downloaded(self) -> list[str]:
        """The names of the files whose content was requested, in order."""
        return [each.rsplit("/", 1)[1] for each in self.asked if each.startswith("GET") and "/content/" in each]


class Answer(BaseHTTPRequestHandler):
    """The answers, with the status codes and headers of https://huggingface.co."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if path == "/api/agent-harnesses":  # a list that the library asks for now and then
            return self.send(404, {}, b"")
        self.server.asked.append(f"{self.command} {path}")
        self.server.tokens[path] = self.headers.get("Authorization")
        if self.server.answer is not None:
            return self.send(*self.server.answer)
        if self.headers.get("Authorization") not in (None, f"Bearer {TOKEN}"):
            return self.refuse(401, "", "Invalid credentials in Authorization header")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            return self.info(*found.groups())
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.resolve(*found.groups())
        if found := re.fullmatch(r"/content/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            return self.content(path, *found.groups())
        return self.refuse(404, "", "Not found")

    def found(self, name: str, revision: str) -> tuple[Repository, str] | None:
        """The repository and the commit of a request; else the refusal is sent."""
        repository = self.server.repositories.get(name)
        if repository is None:  # to those who are not logged in, the Hub does not say whether a private one exists
            status = 404 if self.headers.get("Authorization") else 401
            return self.refuse(status, "RepoNotFound", "Repository not found")
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.files:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, commit

    def info(self, name: str, revision: str) -> None:
        if found := self.found(name, revision):
            repository, commit = found
            files = [{"rfilename": each} for each in repository.files[commit]]
            described = {"_id": "0", "id": name, "sha": commit, "siblings": files, "private": False}
            self.send(200, {"Content-Type": "application/json"}, json.dumps(described).encode())

    def resolve(self, name: str, revision: str, file: str) -> None:
        if not (found := self.found(name, revision)):
            return
        repository, commit = found
        if repository.gated:
            status = 403 if self.headers.get("Authorization") else 401
            return self.refuse(status, "GatedRepo", f"Access to model {name} is restricted.")
        content = repository.files[commit].get(file)
        if content is None:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        about = {"X-Repo-Commit": commit, "Location": f"/content/{name}/{commit}/{file}"}
        if file.endswith(LARGE):
            about |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            about["Location"] = self.server.url.replace("127.0.0.1", "localhost") + about["Location"]
        self.send(302 if file.endswith(LARGE) else 307, about, b"")

    def content(self, path: str, name: str, commit: str, file: str) -> None:
        content = self.server.repositories[name].files[commit][file]
        about = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if self.command == "GET" and path in self.server.breaks:
            self.send(200, about, content, sent=len(content) // 2)
            self.close_connection = True
            return
        self.send(200, about, content)

    def refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code} if code else {}
        self.send(status, headers | {"X-Error-Message": message}, json.dumps({"error": message}).encode())

    def send(self, status: int, headers: Mapping[str, str], body: bytes, sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])

    def log_message(self, *arguments):
        pass


@contextmanager
def running() -> Iterator[Hub]:
    """The server, in a thread of this process."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


def contents(directory: Path) -> dict[str, bytes]:
    """The files of a directory, as a repository holds them."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def at(monkeypatch, url: str) -> None:
    """As if HF_ENDPOINT were this URL; the library reads the variable only once."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def refusal(repository: str = NAME, **options) -> str:
    """The message of the error, in one line."""
    with pytest.raises(ConfigError) as caught:
        snapshot(repository, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
