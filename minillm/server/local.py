"""`LocalServedEngine`: an engine of this process for the HTTP side, without a socket between them.  Lesson 99."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from minillm.engine.async_llm import AsyncLLM

from .config import ServerConfig
from .engine_side.hub import Hub
from .engine_side.line import Line, Shared
from .ledger import Ledger
from .wire import FromEngine, FromWorker
from .worker.link import EngineClient, EngineGone
from .worker.scrape import gauges_of, text_of

log = logging.getLogger(__name__)


class LocalServedEngine(EngineClient):
    """A `ServedEngine` over an `AsyncLLM`, for one event loop. The messages are those of a worker, handed over as they
    are.

        engine = LocalServedEngine(llm)
        app = create_app(engine, "127.0.0.1", engine.metrics_text)

    name: the model's name for clients. ledger: counts the responses that `scrape.Counted` reports to it.
    """

    def __init__(self, engine: AsyncLLM, name: str | None = None, config: ServerConfig = ServerConfig()):
        super().__init__()
        self.hub = Hub(engine, name or engine.name, config)
        self.facts, self.tokenizer = self.hub.facts, engine.tokenizer
        self.ledger = Ledger()
        self.ledger.engine = self.hub.counted
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the requests
        self._line = _LocalLine(self.hub.shared, lambda message: self._on_loop(self.receive, message))
        self._closed = False
        self.hub.attach(self._line)

    @property
    def alive(self) -> bool:
        return not self._closed and self.hub.alive

    def _send(self, message: FromWorker) -> None:
        """Send a message to the engine. Raises EngineGone, and RuntimeError on a second event loop."""
        if not self.alive:
            raise EngineGone("this server is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = loop
        if self._loop is not loop:
            raise RuntimeError("a LocalServedEngine serves one event loop: create another one for this loop")
        self.hub.soon(lambda: self._receive(message))

    def _receive(self, message: FromWorker) -> None:
        """Handle a message on the hub's thread."""
        try:
            self._line.receive(message)
        except Exception:  # as when a connection fails
            log.exception("a message could not be handled; all requests are lost")
            self._line.close()
            self._on_loop(self._end_all, EngineGone)

    def _on_loop(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the loop of the requests, if there is one."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(function, *arguments)

    async def metrics_text(self) -> bytes:
        """Return all metrics, in Prometheus' text format."""
        gauges = await gauges_of(self)
        return text_of(self.ledger.families() + gauges)

    def close(self) -> None:
        """End what runs, with EngineGone. The engine stays open."""
        self._closed = True
        self._on_loop(self._end_all, EngineGone)  # before the line aborts the choices, which are not complete
        self.hub.close()


class _LocalLine(Line):
    """The engine's end."""

    def __init__(self, shared: Shared, hand_over: Callable[[FromEngine], None]):
        super().__init__(shared, reads_text=False)
        self._hand_over = hand_over

    def send(self, message: FromEngine) -> None:
        self._hand_over(message)
