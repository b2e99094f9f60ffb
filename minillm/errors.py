"""Errors that the caller can fix.  Each message names the input, the limit and the way out.

Every error class of the project is a `MinillmError`. Each keeps the built-in class that fits it as a second base, so
that `except ValueError` still catches a wrong value. A bug raises something else, with its traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class MinillmError(Exception):
    """Base class of every error that the caller can fix."""


class ConfigError(MinillmError, ValueError):
    """A model's file, an option or an argument that cannot work; the message says what would."""


class InvalidRequest(MinillmError, ValueError):
    """A request that can never run: the message names the input, the limit and the way out."""


class EngineClosed(MinillmError, RuntimeError):
    """A call of an engine after its `close`."""


class RankFailed(MinillmError, RuntimeError):
    """A process of an engine on several GPUs has ended, hangs or failed: the message names its rank, and why."""


class MissingPackage(MinillmError, ImportError):
    """A package that this part needs is not installed; the message says how to install it."""


class Unreachable(MinillmError, ConnectionError):
    """A server or a site that does not answer."""


@contextmanager
def naming(what: str, index: int, count: int) -> Iterator[None]:
    """Say which of `count` inputs a wrong value is in, by its index. A single input needs no number."""
    try:
        yield
    except MinillmError as error:
        if count == 1 or not isinstance(error, ValueError):
            raise
        raise type(error)(f"{what} {index}: {error}") from None
