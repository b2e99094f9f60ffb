"""The keys of rank_pattern and alpha_pattern: PEFT's regular expressions, of which only the harmless ones are read.

PEFT gives a key to `re`, and an adapter may come from anyone: an expression such as `(x+)+y` can take hours to fail,
and holds Python's lock meanwhile. What people write are names of modules, with dots and `.*`. Those are matched here in
time that is bounded by the lengths of both; any other expression is refused by its name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minillm.errors import ConfigError
from minillm.values import shown

MOST_KEYS, LONGEST = 1024, 1024  # each module of a deep model has one; characters of a key
ANY = ""  # a dot that is not escaped: any one character


@dataclass(frozen=True)
class ModuleKey:
    """A key. pieces: what is between its `.*`, each as characters or ANY. whole: begins with ^, so is no suffix."""

    pieces: Sequence[Sequence[str]]
    whole: bool

    def matches(self, module: str) -> bool:
        """Return whether PEFT would match it: `(.*\\.)?KEY$`, so with the name or with what follows one of its dots."""
        begins = [0] if self.whole else [0, *(at + 1 for at, letter in enumerate(module) if letter == ".")]
        return any(self._matches(module[at:]) for at in begins)

    def _matches(self, text: str) -> bool:
        """Return whether it matches all of a text. The first place for each piece in the middle is the best one."""
        first, *middle = self.pieces
        if not middle:
            return len(text) == len(first) and _is_at(first, text, 0)
        last, end = middle.pop(), len(text)
        at = len(first)
        if not (_is_at(first, text, 0) and _is_at(last, text, end - len(last))):
            return False
        for piece in middle:
            found = next((start for start in range(at, end) if _is_at(piece, text, start)), None)
            if found is None:
                return False
            at = found + len(piece)
        return at <= end - len(last)


def read_patterns(patterns: Any, field: str) -> list[tuple[ModuleKey, Any]]:
    """Return the keys of a field of adapter_config.json, and their values. Raises ConfigError, which names the
    field.
    """
    if patterns is None:
        return []
    if not isinstance(patterns, dict):
        raise ConfigError(f"{field} must be an object, not {shown(patterns)}")
    if len(patterns) > MOST_KEYS:
        raise ConfigError(f"{field} has {len(patterns)} keys, and at most {MOST_KEYS} are read")
    return [(_pattern(key, field), value) for key, value in patterns.items()]


def value_for(patterns: Sequence[tuple[ModuleKey, Any]], module: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that matches a module's name, else `otherwise`."""
    return next((value for pattern, value in patterns if pattern.matches(module)), otherwise)


def _pattern(key: str, field: str) -> ModuleKey:
    if len(key) > LONGEST:
        raise ConfigError(f"{field}: a key has {len(key)} characters, and at most {LONGEST} are read")
    pieces: list[list[str]] = [[]]
    text, at = key.removeprefix("^"), 0
    while at < len(text):
        letter, pair = text[at], text[at : at + 2]
        if pair == ".*":
            if pieces[-1] or len(pieces) == 1:
                pieces.append([])
        elif pair == r"\.":
            pieces[-1].append(".")
        elif letter == ".":
            pieces[-1].append(ANY)
        elif letter.isalnum() or letter in "_-":
            pieces[-1].append(letter)
        else:
            raise ConfigError(
                f"{field} has the key {shown(key)}: only names with dots, \\. and .* are read; "
                "give each module a key of its own instead"
            )
        at += 2 if pair in (".*", r"\.") else 1
    return ModuleKey(pieces, text != key)


def _is_at(piece: Sequence[str], text: str, at: int) -> bool:
    """Return whether a piece matches at a place of a text."""
    if not 0 <= at <= len(text) - len(piece):
        return False
    return all(letter in (ANY, text[at + index]) for index, letter in enumerate(piece))
