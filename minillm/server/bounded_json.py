"""JSON decoded value by value, and no more values than a request may have.  Lesson 99.

`json.loads` decodes a whole text in one call, and no other thread of the process runs meanwhile: 16 MB of `[],[],...`
hold up every stream of a worker for two seconds. This decoder stops at the first value too many. Between two values
(of numbers: between two pieces of their list) other threads have their turn. It calls the json module for a
string, 16 MB of which take 25 to 85 ms, and for the last 16 KB of a text: there cannot be many values in them.
"""

import json
import re
from collections.abc import Container
from json import JSONDecodeError

from minillm.errors import MinillmError

PIECE = 1 << 14  # characters taken at once: numbers, white space, or the end of the text
_SPACE = re.compile(r"[ \t\n\r]*")


class TooManyValues(MinillmError, ValueError):
    """A text has more values than were asked for; `name` is the member of the outermost object that has them."""

    def __init__(self, name: str | None):
        super().__init__(name)
        self.name = name


class TooDeep(MinillmError, ValueError):
    """Values inside values inside values."""


class UnknownMember(MinillmError, ValueError):
    """The outermost object has a member that is not known: its name."""

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


class BoundedDecoder:
    """Decodes one JSON text.

    values: most values, members of objects and elements of lists alike; numbers: most numbers in lists beyond those;
    depth: most lists and objects inside one another; members: names that the outermost object may have.
    """

    def __init__(self, text: str, *, values: int, numbers: int, depth: int, members: Container[str]):
        self.text, self.members = text, members
        self._values_left, self._numbers_left, self._depth = values, numbers, depth
        self._whole = json.JSONDecoder().raw_decode
        self._wrong_until = 0  # where a piece ends that cannot be taken at once
        self._member: str | None = None  # of the outermost object

    def decode(self) -> object:
        """The text's value. Raises JSONDecodeError, TooManyValues, TooDeep, UnknownMember; ValueError for a number of
        too many digits."""
        value, at = self._value(0, 0)
        at = self._skip(at)
        if at != len(self.text):
            raise JSONDecodeError("Extra data", self.text, at)
        return value

    def _value(self, at: int, depth: int) -> tuple[object, int]:
        self._values_left -= 1
        if self._values_left < 0:
            raise TooManyValues(self._member)
        at = self._skip(at)
        first = self._next(at)
        if first not in ("[", "{") or (depth and len(self.text) - at <= PIECE):
            return self._whole(self.text, at)
        if depth == self._depth:
            raise TooDeep
        return (self._list if first == "[" else self._object)(at + 1, depth + 1)

    def _list(self, at: int, depth: int) -> tuple[list, int]:
        values: list = []
        at = self._skip(at)
        if self._next(at) == "]":
            return values, at + 1
        while True:
            at = self._numbers(at, values)
            value, at = self._value(at, depth)
            values.append(value)
            at = self._skip(at)
            if self._next(at) == "]":
                return values, at + 1
            if self._next(at) != ",":
                raise JSONDecodeError("Expecting ',' delimiter", self.text, at)
            at += 1

    def _numbers(self, at: int, values: list) -> int:
        """Take the numbers (and literals) that come next, a piece at a time, up to a list's last."""
        while at >= self._wrong_until and (comma := self._last_comma(at)) >= 0:
            numbers = self._all_numbers(at, comma)
            if not numbers:  # what is wrong will be found again, and named, one by one
                self._wrong_until = comma
                break
            self._numbers_left -= len(numbers)
            if self._numbers_left < 0:
                raise TooManyValues(self._member)
            values += numbers
            at = comma + 1
        return at

    def _all_numbers(self, at: int, end: int) -> list:
        """Numbers with commas between them; none where something else is there."""
        try:
            return json.loads(f"[{self.text[at:end]}]")
        except ValueError:
            return []

    def _last_comma(self, at: int) -> int:
        """Where the last comma is that only numbers and literals come before, within a piece; -1 if there is none."""
        end = at + PIECE
        for other in ('"', "[", "{", "]"):
            found = self.text.find(other, at, end)
            end = end if found < 0 else found
        return self.text.rfind(",", at, end)

    def _object(self, at: int, depth: int) -> tuple[dict, int]:
        members: dict = {}
        at = self._skip(at)
        if self._next(at) == "}":
            return members, at + 1
        while True:
            if self._next(at) != '"':
                raise JSONDecodeError("Expecting property name enclosed in double quotes", self.text, at)
            name, at = self._whole(self.text, at)
            if depth == 1:
                if name not in self.members:
                    raise UnknownMember(name)
                self._member = name
            at = self._skip(at)
            if self._next(at) != ":":
                raise JSONDecodeError("Expecting ':' delimiter", self.text, at)
            members[name], at = self._value(at + 1, depth)
            at = self._skip(at)
            if self._next(at) == "}":
                return members, at + 1
            if self._next(at) != ",":
                raise JSONDecodeError("Expecting ',' delimiter", self.text, at)
            at = self._skip(at + 1)

    def _next(self, at: int) -> str:
        return self.text[at : at + 1]

    def _skip(self, at: int) -> int:
        """Where the white space that begins here ends."""
        if self._next(at) > " ":
            return at
        while (space := _SPACE.match(self.text, at, at + PIECE)) and space.end() == at + PIECE:
            at += PIECE
        return space.end() if space else at
