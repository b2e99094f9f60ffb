"""The adapters that requests may name: loading and unloading them while others run.

Each load of factors (LoRA) has a number of its own, by which everything below knows the adapter: rows, slots and
prefixes in the cache. So an adapter that is loaded again under the same name never finds what the one before has left.
A soft prompt needs no number: it is embeddings before the prompt of a request, whose content is in its prefixes' keys.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minillm.adapters.peft import Adapter, read_adapter
from minillm.adapters.soft_prompts import is_soft_prompt, read_soft_prompt
from minillm.config import DeviceConfig
from minillm.errors import ConfigError, InvalidRequest
from minillm.prompts import EmbeddedPrompt
from minillm.values import shown

if TYPE_CHECKING:
    from .engine import Engine


NOTHING = ""  # the name of an adapter that changes nothing, which no other one can have


def without_soft_prompts(config: DeviceConfig) -> tuple[DeviceConfig, dict[str, str]]:
    """Return the options with the adapters that an executor loads, and the directories of soft prompts by name."""
    soft = {name: directory for name, directory in config.adapters if is_soft_prompt(directory)}
    if not soft:
        return config, soft
    return replace(config, adapters=tuple(each for each in config.adapters if each[0] not in soft)), soft


def soft_prompts(self: "Engine", directories: Mapping[str, str | Path]) -> dict[str, np.ndarray]:
    """Return the embeddings of soft prompts, [n, hidden], by name. Raises ConfigError."""
    model, dtype, most = self.model_config, self.facts.dtype, self.max_model_len
    return {name: read_soft_prompt(directory, model, dtype, most) for name, directory in directories.items()}


class LoadedAdapters:
    """The meaning of each name: the number of a load, a soft prompt [n, hidden], or None while it is being loaded.

    All are in one table: a thread that prepares a request looks a name up once, and does not wait for the engine lock,
    which those who change the table hold. names: adapters that the executor has loaded first, as loads 1, 2 and so on.
    """

    def __init__(self, names: Iterable[str], soft: Mapping[str, np.ndarray]):
        self.by_name: dict[str, int | np.ndarray | None] = {name: load for load, name in enumerate(names, 1)}
        self.next = len(self.by_name) + 1
        self.by_name |= soft
        self.retired: set[int] = set()  # unloaded, but requests that run still need them

    @property
    def names(self) -> list[str]:
        """Return the names that requests may give."""
        return [name for name, found in self.by_name.copy().items() if found is not None]

    @property
    def loads(self) -> dict[str, int]:
        """Return the number of each adapter's load, by its name; 0 for a soft prompt."""
        found = self.by_name.copy().items()
        return {name: each if isinstance(each, int) else 0 for name, each in found if each is not None}

    def resolve(self, name: str | None, prompt: np.ndarray | EmbeddedPrompt) -> tuple[int, np.ndarray | EmbeddedPrompt]:
        """Return the number of an adapter's load, and the prompt with its soft prompt before it, if it is one.

        The number is 0 for None and for a soft prompt. Raises InvalidRequest for a name without an adapter.
        """
        if name is None:
            return 0, prompt
        found = self.by_name.get(name)
        if found is None:
            there = f"there are {', '.join(map(repr, self.names))}" if self.names else "this engine has no adapters"
            raise InvalidRequest(f"adapter {shown(name)} is not loaded: {there}")
        return (found, prompt) if isinstance(found, int) else (0, EmbeddedPrompt.of([found, prompt]))

    def check(self, load: int, name: str | None) -> None:
        """Raise InvalidRequest if an adapter was unloaded after its request was prepared."""
        now = self.by_name.get(name) if name is not None else None
        if load and not (isinstance(now, int) and now == load):
            raise InvalidRequest(f"adapter {shown(name)} was unloaded just now: load it again, or name another one")

    def reserve(self, name: str) -> int:
        """Return the number of a load that begins, and let no other one have its name. Raises ConfigError."""
        if name in self.by_name:
            raise ConfigError(f"adapter {shown(name)} is loaded already: unload it first, or choose another name")
        self.by_name[name] = None
        load, self.next = self.next, self.next + 1
        return load


def load_adapter(self: "Engine", name: str, directory: str | Path) -> None:
    """Load an adapter while requests run, under a name that requests can give from then on.

    It is read without the engine's lock, so that steps of others go on meanwhile. Raises ConfigError for a name that is
    in use, also by a load that is under way, and for an adapter that cannot be read or does not fit; EngineClosed.
    """
    self._check_usable()
    if not isinstance(name, str) or not name:
        raise ConfigError(f"an adapter's name must be a non-empty string, not {shown(name)}")
    if not isinstance(directory, (str, PathLike)):
        raise ConfigError(f"an adapter's directory must be a path, not {shown(directory)}")
    with self.lock:
        load = self.adapters.reserve(name)
    try:
        found: int | np.ndarray = load
        if is_soft_prompt(directory):
            found = soft_prompts(self, {name: directory})[name]
        else:
            self.executor.load_adapter(load, read_adapter(directory, self.model_config))
    except BaseException as error:
        with self.lock:
            del self.adapters.by_name[name]
        if isinstance(error, OSError):
            raise ConfigError(f"adapter {shown(name)} cannot be read: {error}") from None
        raise
    with self.lock:
        self.adapters.by_name[name] = found


def unload_adapter(self: "Engine", name: str) -> None:
    """Forget an adapter. Requests that run with it still end with it; new ones are refused.

    Raises InvalidRequest if no adapter has this name; EngineClosed.
    """
    self._check_usable()
    if not isinstance(name, str):
        raise InvalidRequest(f"an adapter's name must be a string, not {shown(name)}")
    with self.lock:
        load, _ = self.adapters.resolve(name, np.zeros(0, np.int32))
        del self.adapters.by_name[name]
        if load:  # requests that run have a soft prompt's embeddings
            self.adapters.retired.add(load)
            self._forget_adapter(load)


@contextmanager
def some_adapter(self: "Engine") -> Iterator[str | None]:
    """The name of an adapter, to run steps with one: any of those loaded, or one that changes nothing, in the block.

    None if this engine's requests can have none.
    """
    names = [name for name, load in self.adapters.loads.items() if load]
    if names or not self.config.adapter_slots or self.config.ranks > 1:
        yield names[0] if names else None
        return
    load = self.adapters.reserve(NOTHING)
    self.executor.load_adapter(load, Adapter(Path(), 0, {}))
    self.adapters.by_name[NOTHING] = load
    try:
        yield NOTHING
    finally:
        unload_adapter(self, NOTHING)


def forget_adapter(self: "Engine", load: int) -> None:
    """Free an adapter that was unloaded, as soon as no request needs it."""
    if load in self.adapters.retired and all(load != each.request.load for each in self.tracked.values()):
        self.adapters.retired.discard(load)
        self.executor.unload_adapter(load)
