"""Starting and stopping the HTTP server around an engine.  Lesson 99."""

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

GRACE = 5  # seconds that requests in flight get to finish when the server stops


class PortTaken(OSError):
    """Something else listens on the port asked for."""


@dataclass
class RunningServer:
    """A server in this process: `url` without a trailing slash, the engine behind it, the name it serves."""

    url: str
    engine: object
    model: str


def serve(
    model: str | Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    log_level: str = "info",
    **engine_options,
) -> None:
    """Serve until interrupted (Ctrl-C).  Lesson 99.

    model: a directory, a preset's name, or None for the embedded tiny-gemma. port 0 takes any free one.
    engine_options are `EngineConfig`'s. Raises PortTaken, ConfigError.
    """
    import uvicorn

    listener = _listen(host, port)
    try:
        with _engine(model, engine_options) as engine:
            name = served_model_name or engine.name
            print(f"minillm serves {name} at {_url(host, listener)}/v1 (Ctrl-C stops it)", flush=True)
            uvicorn.Server(_settings(engine, name, log_level)).run(sockets=[listener])
    finally:
        listener.close()


@contextmanager
def running(
    model=None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    served_model_name: str | None = None,
    log_level: str = "warning",
    **engine_options,
) -> Iterator[RunningServer]:
    """A server in a thread of this process, for a notebook or a test, until the block ends.  Lesson 99.

    model: an `LLM` or `AsyncLLM`, which stays open afterwards, or what `serve` takes, closed at the end.

        with running("data/tiny-gemma") as server:
            openai.OpenAI(base_url=server.url + "/v1", api_key="none")

    Raises PortTaken, ConfigError; RuntimeError when the server does not come up.
    """
    import uvicorn

    listener = _listen(host, port)
    try:
        with _engine(model, engine_options) as engine:
            name = served_model_name or engine.name
            server = uvicorn.Server(_settings(engine, name, log_level))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="minillm-http")
            thread.start()
            try:
                while not server.started:
                    if not thread.is_alive():
                        raise RuntimeError("the HTTP server stopped while starting; its log says why")
                    time.sleep(0.005)
                yield RunningServer(_url(host, listener), engine, name)
            finally:
                server.should_exit = True
                thread.join()
    finally:
        listener.close()


@contextmanager
def _engine(model, options: dict) -> Iterator[object]:
    from minillm.async_engine import AsyncLLM
    from minillm.engine import LLM

    made = not hasattr(model, "stream") and not isinstance(model, LLM)
    if options and not made:
        raise TypeError(f"the engine exists already: {', '.join(options)} can no longer be set")
    if hasattr(model, "stream"):
        yield model
        return
    engine = AsyncLLM(model, **options) if made else AsyncLLM(engine=model)
    try:
        yield engine
    finally:
        engine.close()


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket: taken before the model loads, so that a taken port is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Two sockets with SO_REUSEADDR may both bind; only one may listen.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            way_out = "stop what listens there, or take another port (0 takes any free one)"
            raise PortTaken(error.errno, f"port {port} of {host} is taken: {way_out}") from None
        raise
    return listener


def _url(host: str, listener: socket.socket) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{listener.getsockname()[1]}"


def _settings(engine, name: str, log_level: str):
    import uvicorn

    from .app import create_app

    return uvicorn.Config(
        create_app(engine, name),
        log_level=log_level,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=GRACE,
    )
