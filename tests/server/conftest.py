"""A server of processes, and one within this process, running a small random model with tiny-gemma's tokenizer."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from minillm.engine.async_llm import AsyncLLM
from minillm.server import running
from tests.waiting import TIMEOUT

TOKENIZER = Path(__file__).parents[2] / "data" / "tiny-gemma"
MAX_MODEL_LEN = 256


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small-random"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    size = 1 + max(*vocabulary["model"]["vocab"].values(), *(added["id"] for added in vocabulary["added_tokens"]))
    config = {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "vocab_size": size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": MAX_MODEL_LEN,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def engine(model_directory):
    engine = AsyncLLM(model_directory, load_format="dummy", device="cpu", max_num_seqs=32)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def server(engine):
    with running(engine, keep_alive_timeout=TIMEOUT) as server:  # clients that are kept rest between two tests
        yield server


@dataclass
class Here:
    """A server without a socket and without processes, and a client of it."""

    engine: AsyncLLM
    model: str
    client: httpx.Client
    hub: Any


@contextmanager
def served_here(engine: AsyncLLM, **options) -> Iterator[Here]:
    """Serve an engine within this process; options: fields of `ServerConfig`."""
    pytest.importorskip("fastapi", reason="the server needs fastapi, which is not installed here")
    from starlette.testclient import TestClient

    from minillm.server.config import ServerConfig
    from minillm.server.local import LocalServedEngine
    from minillm.server.worker.app import create_app
    from minillm.server.worker.scrape import Counted

    served = LocalServedEngine(engine, config=ServerConfig(log_level="warning", **options))
    app = Counted(create_app(served, "127.0.0.1", served.metrics_text), served.ledger.answered)
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as client:
        try:
            yield Here(engine, served.facts.name, client, served.hub)
        finally:
            served.close()


def pytest_collection_modifyitems(items):
    """A client of this process has no timeout of its own."""
    for item in items:
        if "here" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.fixture(scope="session")
def here(engine):
    with served_here(engine) as here:
        yield here
