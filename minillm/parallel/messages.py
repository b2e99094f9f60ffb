"""The messages between an engine and its ranks, as pickles over a socket.

The engine sends `LoadShard`, then steps, which a pipeline gets as `StepOfStages`, `WARM_UP`, and a `Replace` whenever
what it replaces has changed; a rank answers each of them, in order, with `Answered` or `Failed`. `PING` is answered at
once, whatever else the rank does.
"""

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from minillm.config import DeviceConfig
from minillm.errors import ConfigError, MinillmError, RankFailed
from minillm.overrides import Used
from minillm.runner.launched import Results
from minillm.scheduler.step import Step

from .collectives import PeerLost

WARM_UP, PING = "warm up", "ping"


@dataclass(frozen=True)
class Replace:
    """Run these functions in place of the engine's own, until the next such message."""

    functions: tuple[dict[str, bytes], ...]  # of each block of `using`, the outermost first: by name, pickled
    path: tuple[str, ...]  # where modules that they import are


@dataclass(frozen=True)
class LoadShard:
    """Load the rank's shard of a model, in place of what the rank had loaded before."""

    source: Path | str
    config: DeviceConfig  # of this rank: it names the device
    replace: Replace  # carried out first


class Ran(NamedTuple):
    """The answer of the first rank of a stage to a step."""

    results: Results | None  # of the last stage
    used: list[Used]  # for each block of the last `Replace`: calls since then


class YieldedTokens(NamedTuple):
    """Tokens that the last stage of a pipeline has sampled: each one's row, its position there, and its id, [n]."""

    rows: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class StepOfStages:
    """A step of a pipeline, and what the engine has read since the step before."""

    step: Step
    sampled: list[YieldedTokens]


@dataclass(frozen=True)
class Answered:
    """The answer to a message.

    LoadShard: `Facts`. A step: `Ran` (the first rank of a stage), or the checksum of its tokens (others, None if the
    stage does not sample). Replace: why it cannot be, or None. WARM_UP: None.
    """

    value: Any


@dataclass(frozen=True)
class Pong:
    """The answer to a ping. entered: collectives that the rank has begun. working: neither idle nor in one of them."""

    entered: int
    working: bool


@dataclass(frozen=True)
class Failed:
    """The rank failed, and runs no more steps."""

    message: str
    expected: bool  # whether it is a ConfigError, which the caller can fix
    by_others: bool  # whether it failed because another rank did
    trace: str = ""  # its traceback, if it was not expected

    @property
    def error(self) -> type[MinillmError]:
        """Return the error that the engine raises."""
        return ConfigError if self.expected else RankFailed

    @classmethod
    def of(cls, error: Exception) -> Self:
        expected, by_others = isinstance(error, ConfigError), isinstance(error, PeerLost)
        message = str(error) if expected or by_others else f"{type(error).__name__}: {error}"
        trace = "" if expected or by_others else "".join(traceback.format_exception(error))
        return cls(message, expected, by_others, trace)
