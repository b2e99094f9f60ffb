"""Start a server, in processes of its own or around an engine of this one, and stop it.  Lesson 99."""

import errno
import importlib.util
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from minillm import overrides
from minillm.config import EngineOptions
from minillm.errors import ConfigError, MinillmError, MissingPackage
from minillm.folders import how_to_install

from .config import ServerConfig, ServerOptions, digest, split
from .supervisor.fleet import ServerFailed, Workers
from .supervisor.supervisor import Supervisor

if TYPE_CHECKING:  # importing these loads torch: `running` does it when called
    from minillm.engine.async_llm import AsyncLLM
    from minillm.engine.llm import LLM

    from .engine_side.hub import Hub

log = logging.getLogger(__name__)
NEEDED = ("fastapi", "uvicorn", "prometheus_client")
__all__ = ["PortTaken", "RunningServer", "ServerFailed", "running", "serve"]


class PortTaken(MinillmError, OSError):
    """The requested port is already in use."""


@dataclass
class RunningServer:
    """A server: its `url` (no trailing slash), its engine, the model's name for clients, its workers, and the hub."""

    url: str
    engine: "AsyncLLM"
    model: str
    workers: Workers
    hub: "Hub"


def serve(
    model: str | Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    profile: str | None = None,
    **options: Unpack[ServerOptions],
) -> None:
    """Serve until interrupted (Ctrl-C) or terminated.  Lesson 99.

    The engine runs in a process of its own, which is replaced if it ends or is stuck: requests in flight end with an
    error, and the workers answer 503 until the new engine is ready. Functions installed with `minillm.using` exist
    only in the process that installed them; with one in place, and on Windows, the engine runs in this process.

    model: a directory, the name of a preset, or None for the included tiny-gemma. port: 0 picks a free one.
    served_model_name: the model's name for clients. profile: a name that `minillm.advice.profiles` knows, or "auto".
    options: fields of `ServerConfig` and of `EngineConfig`. Requests that run at shutdown have shutdown_grace seconds
    to finish; a second signal aborts them.

    Raises PortTaken, ConfigError; ServerFailed if the engine cannot be started, or no worker is left.
    """
    config, engine_options = split(options)
    check_server(config)
    with terminate_as_interrupt(), listening(host, port) as listener:
        url, fleet = url_of(host, listener), _workers(listener, config)
        try:
            if sys.platform == "win32" or overrides.any_replaced():
                if profile is not None:
                    from minillm.advice import profiles

                    engine_options = profiles.apply(model, profile, engine_options)
                with _engine(model, engine_options) as engine:
                    _serve_here(engine, served_model_name or engine.name, url, fleet, config)
                return
            from .engine_side.engine_process import packed

            choice = {"model": model, "profile": profile, "name": served_model_name}
            arguments = packed(choice | {"engine": engine_options, "config": config})
            supervisor = Supervisor(fleet, arguments, config.hang_timeout, config.load_timeout)
            try:
                supervisor.start()
                announce(supervisor.model, url)
                supervisor.join()
            finally:
                supervisor.stop()
        except KeyboardInterrupt:
            log.info("minillm has stopped")


def _serve_here(engine: "AsyncLLM", name: str, url: str, fleet: Workers, config: ServerConfig) -> None:
    with _serving(engine, name, url, fleet, config) as server:
        announce(server.model, url)
        fleet.join()


def announce(model: str, url: str) -> None:
    """Say that the server is ready. model: its name, or those of several."""
    log.info("minillm is serving %s at %s/v1, with a live page at %s (press Ctrl-C to stop)", model, url, url)


@contextmanager
def running(
    model: "str | Path | LLM | AsyncLLM | None" = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    served_model_name: str | None = None,
    **options: Unpack[ServerOptions],
) -> Iterator[RunningServer]:
    """Serve an engine of this process until the block ends, for a notebook or a test.  Lesson 99.

    model: an `LLM` or `AsyncLLM`, which stays open afterward, or any model that `serve` accepts, which is closed at the
    end. The other arguments are those of `serve`, but log_level is "warning". An engine that is stuck is not replaced
    here, but /health says so.

        with running("data/tiny-gemma") as server:
            openai.OpenAI(base_url=server.url + "/v1", api_key="none")

    Raises PortTaken, ConfigError; ServerFailed if a worker does not start.
    """
    config, engine_options = split(options, log_level="warning")
    check_server(config)
    with listening(host, port) as listener, _engine(model, engine_options) as engine:
        fleet, name = _workers(listener, config), served_model_name or engine.name
        with _serving(engine, name, url_of(host, listener), fleet, config) as server:
            yield server


@contextmanager
def _serving(engine: "AsyncLLM", name: str, url: str, fleet: Workers, config: ServerConfig) -> Iterator[RunningServer]:
    """Serve an engine of this process."""
    from .engine_side.hub import Hub

    hub = Hub(engine, name, config)
    try:
        fleet.ledger.engine = hub.counted
        fleet.start(hub.connect)
        yield RunningServer(url, engine, name, fleet, hub)
    finally:
        try:
            fleet.stop()
        finally:
            hub.close()
            fleet.close()


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Make SIGTERM act like Ctrl-C; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_server(config: ServerConfig) -> None:
    """Check what can be checked before a model loads. Raises ConfigError, MissingPackage."""
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            how = how_to_install("minillm[serve]")
            raise MissingPackage(f"the server needs {name}, which is not installed: {how}")
    from .worker.gate import hosts, origins

    digest(config.api_key)
    origins(config.cors_origins)
    hosts(config.allowed_hosts, "127.0.0.1")


def _workers(listener: socket.socket, config: ServerConfig) -> Workers:
    return Workers(listener, config.workers, config.shutdown_grace, config.hang_timeout)


@contextmanager
def _engine(model: "str | Path | LLM | AsyncLLM | None", options: EngineOptions) -> "Iterator[AsyncLLM]":
    from minillm.engine.async_llm import AsyncLLM
    from minillm.engine.llm import LLM

    if options and isinstance(model, (LLM, AsyncLLM)):
        raise ConfigError(f"the engine already exists: {', '.join(options)} can no longer be set")
    if isinstance(model, AsyncLLM):
        yield model
        return
    engine = AsyncLLM(engine=model) if isinstance(model, LLM) else AsyncLLM(model, **options)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listen until the block ends. Raises PortTaken, OSError."""
    listener = _listen(host, port)
    try:
        yield listener
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    """Bind and listen before the model loads, so that a port in use is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # With SO_REUSEADDR, two sockets may bind to the same port, but only one may listen.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            way_out = "stop the process that listens there, or choose another port (0 picks a free one)"
            raise PortTaken(error.errno, f"port {port} on {host} is in use: {way_out}") from None
        raise
    return listener


def url_of(host: str, listener: socket.socket) -> str:
    """Return the server's URL for clients of this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{listener.getsockname()[1]}"
