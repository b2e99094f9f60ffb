"""Load the adapters that clients name, in a thread of their own, and know which a new engine has to load again.

A load reads files and may take seconds. It delays neither the hub's thread, nor a step, nor a grammar that is compiled.
Loads run one after another, and only so many may wait; each takes memory of the host, so there is a limit of all, too.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from minillm.adapters.peft import CONFIG, FACTORS
from minillm.engine.async_llm import AsyncLLM
from minillm.errors import ConfigError, InvalidRequest, MinillmError
from minillm.values import shown

from ..limits import MAX_LOADS

log = logging.getLogger(__name__)
# By name: the directory that was loaded, as its client has given it; None: one of the start was unloaded.
Changes = dict[str, str | None]


class AdapterLoader:
    """Loads and unloads adapters of an engine while it runs.

    folder: where their directories are; None: clients may load none. most: adapters that may be loaded, with those of
    the start. changed: called with all changes after each, before the client has its answer.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        folder: str | None,
        most: int,
        changed: Callable[[Changes], object] = lambda changes: None,
    ):
        self.engine, self.folder, self.most, self._changed = engine, folder, most, changed
        self._of_start = set(engine.adapters)
        self._changes: Changes = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="minillm-adapters")
        self._lock = threading.Lock()
        self.waiting = 0  # loads that wait or run

    def load(self, name: str, directory: str) -> Future[None]:
        """Load an adapter from within the folder. Raises TooManyLoads; the future: InvalidRequest."""
        with self._lock:
            if self.waiting >= MAX_LOADS:
                raise TooManyLoads(f"{self.waiting} adapters wait to be loaded already: try again in a few seconds")
            self.waiting += 1
        try:
            future = self._thread.submit(self._load, name, directory)
        except RuntimeError:  # the server stops
            self._one_less()
            raise
        future.add_done_callback(lambda _: self._one_less())
        return future

    def unload(self, name: str) -> Future[None]:
        """Forget an adapter, after the loads that wait. The future raises InvalidRequest."""
        return self._thread.submit(self._unload, name)

    def restore(self, changes: Mapping[str, str | None]) -> None:
        """Make the changes that clients of an engine before this one have made. What fails now is left out."""
        for name, directory in changes.items():
            try:
                if name in self._of_start:
                    self._unload(name)
                if directory is not None:
                    self._load(name, directory)
            except MinillmError as error:
                log.warning(
                    "adapter %s was loaded before the engine ended, and cannot be loaded again: %s", name, error
                )

    def close(self) -> None:
        """Finish the load that runs, and begin no other."""
        self._thread.shutdown(cancel_futures=True)

    def _one_less(self) -> None:
        with self._lock:
            self.waiting -= 1

    def _load(self, name: str, directory: str) -> None:
        if self.folder is None:
            raise InvalidRequest("this server loads no adapters: start it with --adapter-folder DIR")
        path = _within(Path(self.folder), directory)
        if (there := len(self.engine.adapters)) >= self.most:
            raise InvalidRequest(
                f"{there} adapters are loaded, and max_adapters={self.most}: unload one, or start the server with more"
            )
        try:
            self.engine.load_adapter(name, path)
        except ConfigError as error:
            raise InvalidRequest(str(error)) from None
        self._changes[name] = directory
        self._changed(dict(self._changes))

    def _unload(self, name: str) -> None:
        self.engine.unload_adapter(name)
        self._changes.pop(name, None)
        if name in self._of_start:
            self._changes[name] = None
        self._changed(dict(self._changes))


class TooManyLoads(MinillmError):
    """So many adapters wait to be loaded that no other one may."""


def _within(folder: Path, directory: str) -> Path:
    """Return where an adapter's directory is. Raises InvalidRequest unless its files are within the folder too."""
    try:
        root = folder.resolve()
        path = (root / directory).resolve()
        paths = [path, *((path / name).resolve() for name in (CONFIG, FACTORS))]
        inside, there = all(each.is_relative_to(root) for each in paths), path.is_dir()
    except (OSError, ValueError, RuntimeError):  # a name that is too long or has a zero byte; links in a circle
        inside, there = True, False
    if not inside:
        raise InvalidRequest(f"{shown(directory)} is not within the server's folder of adapters")
    if not there:
        raise InvalidRequest(f"{shown(directory)} is no directory in the server's folder of adapters")
    return path
