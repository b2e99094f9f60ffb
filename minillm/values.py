"""Values as users and their files give them: what counts as a number, and how an error shows what does not."""

import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from .errors import MinillmError

QUOTED = 40  # characters of an input that an error quotes
_quotes = reprlib.Repr()
_quotes.maxstring = _quotes.maxlong = _quotes.maxother = QUOTED


def as_int(value: object) -> int | None:
    """Return a whole number of Python's, numpy's or torch's; None for anything else, booleans included."""
    if type(value) is int:
        return value
    value = _single(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def as_float(value: object) -> float | None:
    """Return a finite number of Python's, numpy's or torch's; None for anything else: booleans, what no float holds."""
    value = _single(value)
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _single(value: object) -> Any:
    """Return the number in an array or a tensor without dimensions; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def as_tuple(value: object) -> tuple | None:
    """Return a collection's values as a tuple, () for None; None for text, bytes, mappings and single values."""
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, bytearray, memoryview, Mapping)):
        return None
    return tuple(value)


def shown(value: object, most: int = 80) -> str:
    """Return a value as an error quotes it: the beginning and the end of one that is long, and at most `most`
    characters.
    """
    try:
        text = _quotes.repr(value)
    except Exception:  # a number with more digits than Python writes, an object of the user's own
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def read_json(path: Path, error: type[MinillmError]) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `error`, which names the file."""
    try:
        fields = json.loads(path.read_bytes())
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause.strerror}") from None
    except (ValueError, RecursionError) as cause:
        raise error(f"{path} is not JSON ({cause}): copy it again") from None
    if not isinstance(fields, dict):
        raise error(f"{path} must hold an object of fields, not {shown(fields)}")
    return fields
