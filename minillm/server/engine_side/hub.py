"""Connect the engine to its workers: the thread that reads their sockets.  Lesson 99.

One thread reads all worker sockets. The engine's thread sends the results of each step. If a socket's buffer is full,
the reading thread sends the rest later, so that a slow worker never delays a step.
"""

import logging
import selectors
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from minillm.engine.async_llm import AsyncLLM
from minillm.errors import ConfigError
from minillm.values import shown

from ..config import ServerConfig, digest
from ..engine_room.state import EngineRoom
from ..ledger import Families
from ..token_texts import TokenTexts
from ..wire import EngineFacts, Hello
from .adapter_loader import AdapterLoader, Changes
from .admission import Admission
from .line import Line, Shared, SocketLine
from .metrics import Metrics, cache_facts

log = logging.getLogger(__name__)


class Hub:
    """Connects an engine to its workers.

    An engine that is busy with the same step for longer than config.hang_timeout counts as stuck, and not as ready.
    adapters_changed: told what clients have loaded and unloaded: see `AdapterLoader`. Raises ConfigError for an adapter
    that has the model's name, since requests that give it would get the model.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        name: str,
        config: ServerConfig = ServerConfig(),
        adapters_changed: Callable[[Changes], object] = lambda changes: None,
    ):
        if name in engine.adapters:
            raise ConfigError(
                f"adapter {shown(name)} has the name of the model: give it another, or set --served-model-name"
            )
        self.engine, self.config = engine, config
        self.lines: set[Line] = set()
        rows = engine.config.max_num_seqs
        self.admission = Admission(rows, config, self.lines)
        self.metrics = Metrics(name, engine.max_model_len, cache_facts(engine))
        self.engine_room = EngineRoom(engine, self.metrics, self.soon)
        texts, compiler = TokenTexts(engine.tokenizer), ThreadPoolExecutor(1, thread_name_prefix="minillm-grammars")
        self.loader = AdapterLoader(engine, config.adapter_folder, config.max_adapters, adapters_changed)
        parts = self.admission, self.metrics, self.engine_room, texts, compiler, self.loader
        self.shared = Shared(engine, config, *parts, self.soon)
        directory = engine.tokenizer_directory
        # Whether all text is encoded and decoded here: workers cannot load a tokenizer that was passed as an object.
        self.reads_text = engine.tokenizer is not None and directory is None
        self.facts = EngineFacts(
            name=name,
            encodes=engine.tokenizer is not None,
            max_model_len=engine.max_model_len,
            max_request_len=engine.max_request_len,
            vocab_size=engine.model_config.vocab_size,
            dtype=str(engine.dtype).removeprefix("torch."),
            max_num_seqs=rows,
            capacity=self.admission.capacity.choices,
            config=replace(config, api_key=None),
            api_key=digest(config.api_key),
            hidden_size=engine.model_config.hidden_size,
            block_size=engine.config.block_size,
            prefix_blocks=_prefix_blocks(engine),
            takes_adapters=engine.config.adapter_slots > 0
            or bool(engine.adapters)
            or config.adapter_folder is not None,
            adapters=engine.engine.adapters.loads,
            cache_dtype=engine.engine.facts.kv_cache_dtype,
        )
        self.hello = Hello(self.facts, str(directory.resolve()) if directory else None)
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)  # if it is full, the thread will wake up anyway
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._tasks: list[Callable[[], None]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="minillm-hub", daemon=True)
        self._thread.start()

    def connect(self, sock: socket.socket, closed: Callable[[], object] = lambda: None) -> SocketLine:
        """Start exchanging messages with a worker at the other end of a socket.

        closed: called on the hub's thread once that connection is closed.
        """
        line = SocketLine(self.shared, self.reads_text, sock, self._want_write, closed)
        line.send(self.hello)
        self.soon(lambda: self._listen(line))
        return line

    def attach(self, line: Line) -> None:
        """Start serving a worker of this process."""
        self.soon(lambda: self.lines.add(line))

    @property
    def alive(self) -> bool:
        """Return whether its thread runs."""
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        """Return the number of choices that were accepted and are not finished."""
        return self.admission.running

    def counted(self) -> Families:
        """Return what the engine and this hub have counted so far. Any thread may call it."""
        return self.metrics.counted(self.engine.stats())

    def close(self) -> None:
        """Stop the thread and disconnect every worker; choices that still run are aborted."""
        self._closing = True
        self.soon(lambda: None)
        self._thread.join()
        self.shared.compiler.shutdown(cancel_futures=True)
        self.loader.close()

    def soon(self, task: Callable[[], None]) -> None:
        """Run `task` on the hub's thread."""
        self._tasks.append(task)
        with suppress(OSError):  # the hub was closed
            self._wake.send(b"\0")

    # ---- on the hub's thread

    def _listen(self, line: SocketLine) -> None:
        self.lines.add(line)
        self._selector.register(line.sock, selectors.EVENT_READ, line)

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(self.admission.refuse_the_overdue()):
                line = key.data
                if line is None:
                    self._woken.recv(4096)
                    self._run_tasks()
                    continue
                if not self._serve(line, events):
                    self._drop(line)
        self._run_tasks()  # a connection that has just come is closed with the others
        for line in list(self.lines):
            self._drop(line)
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def _run_tasks(self) -> None:
        while self._tasks:
            try:
                self._tasks.pop(0)()
            except Exception:  # it must not end the thread, which serves everyone
                log.exception("an operation of the server failed")

    def _serve(self, line: SocketLine, events: int) -> bool:
        """Do the reads and writes that are ready; return False if the connection is closed or broken."""
        try:
            if events & selectors.EVENT_WRITE:
                line.flush()
            return not events & selectors.EVENT_READ or line.read()
        except Exception:  # an error on one line must not affect the other workers
            log.exception("the connection to an HTTP worker failed; its requests are lost")
            return False

    def _want_write(self, line: SocketLine, wanted: bool) -> None:
        if line in self.lines:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
            self._selector.modify(line.sock, events, line)

    def _drop(self, line: Line) -> None:
        self.lines.discard(line)
        if isinstance(line, SocketLine):
            self._selector.unregister(line.sock)
        line.close()


def _prefix_blocks(engine: AsyncLLM) -> int:
    """Return how many blocks of prefixes the cache can hold; 0 if it keeps none."""
    facts = engine.engine.facts
    return facts.num_blocks // len(facts.windows) if engine.config.enable_prefix_caching else 0
