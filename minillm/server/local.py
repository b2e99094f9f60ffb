"""`LocalServedEngine`: an engine of this process for the HTTP side, without a socket between them.  Lesson 99."""

import asyncio
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
        self._line = _LocalLine(self.hub.shared, self._hand_over)
        self.hub.attach(self._line)

    @property
    def alive(self) -> bool:
        return self.hub.alive

    def _send(self, message: FromWorker) -> None:
        if not self.alive:
            raise EngineGone("this server is closed")
        self._loop = asyncio.get_running_loop()
        self.hub.soon(lambda: self._line.receive(message))

    def _hand_over(self, message: FromEngine) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self.receive, message)

    async def metrics_text(self) -> bytes:
        """Return all metrics, in Prometheus' text format."""
        gauges = await gauges_of(self)
        return text_of(self.ledger.families() + gauges)

    def close(self) -> None:
        """Abort what runs. The engine stays open."""
        self.hub.close()


class _LocalLine(Line):
    """The engine's end."""

    def __init__(self, shared: Shared, hand_over: Callable[[FromEngine], None]):
        super().__init__(shared, reads_text=False)
        self._hand_over = hand_over

    def send(self, message: FromEngine) -> None:
        self._hand_over(message)
