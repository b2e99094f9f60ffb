"""What an engine and its ranks say to each other, as pickles over a socket.

The engine sends `LoadShard`, then steps and `WARM_UP`; a rank answers each of them, in order, with `Answered` or
`Failed`. `PING` is answered at once, whatever else the rank does.
"""

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from minillm.config import DeviceConfig
from minillm.errors import ConfigError, MinillmError, RankFailed

from .collectives import PeerLost

WARM_UP, PING = "warm up", "ping"


@dataclass(frozen=True)
class LoadShard:
    """Load the rank's shard of a model, in place of what the rank had loaded before."""

    place: Path | str
    config: DeviceConfig  # of this rank: it names the device


@dataclass(frozen=True)
class Answered:
    """The answer to a message: `Facts`, a step's results (rank 0), the checksum of its tokens (others), or None."""

    value: Any


@dataclass(frozen=True)
class Pong:
    """The answer to a ping. entered: collectives that the rank has begun."""

    entered: int


@dataclass(frozen=True)
class Failed:
    """The rank failed, and runs no more steps."""

    message: str
    expected: bool  # whether it is a ConfigError, which the caller can fix
    by_others: bool  # whether it failed because another rank did
    trace: str = ""  # its traceback, if it was not expected

    @property
    def error(self) -> type[MinillmError]:
        """What the engine raises."""
        return ConfigError if self.expected else RankFailed

    @classmethod
    def of(cls, error: Exception) -> Self:
        expected, by_others = isinstance(error, ConfigError), isinstance(error, PeerLost)
        message = str(error) if expected or by_others else f"{type(error).__name__}: {error}"
        trace = "" if expected or by_others else "".join(traceback.format_exception(error))
        return cls(message, expected, by_others, trace)
