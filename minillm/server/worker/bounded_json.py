"""Decode JSON one value at a time, up to a limit on the number of values.  Lesson 99.

`json.loads` decodes a whole text in one call and holds the GIL throughout, so a body of many small values
(`[],[],...`) would stall every stream of a worker. This decoder stops as soon as a text exceeds a limit. Other threads
can run between two values or, in a list of numbers, between two pieces of the list. A single call to the json module
decodes only one string, number, or literal, one piece of a list of numbers, or the last `PIECE` characters of a text.
"""

import json
import re
from collections.abc import Container
from json import JSONDecodeError

from minillm.errors import MinillmError

PIECE = 1 << 14  # characters processed in one call: numbers, white space, or the end of the text
_SPACE = re.compile(r"[ \t\n\r]*")


class TooManyValues(MinillmError, ValueError):
    """The text has too many values; `name` is the member of the outermost object that exceeds the limit."""

    def __init__(self, name: str | None):
        super().__init__(name)
        self.name = name


class TooDeep(MinillmError, ValueError):
    """Lists and objects are nested too deeply."""


class UnknownMember(MinillmError, ValueError):
    """The outermost object has an unknown member, `name`."""

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


class BoundedDecoder:
    """Decodes one JSON text.

    values: most values, counting object members and list elements; numbers: most additional numbers in lists;
    depth: most levels of nested lists and objects; members: the names allowed in the outermost object.
    """

    def __init__(self, text: str, *, values: int, numbers: int, depth: int, members: Container[str]):
        self.text, self.members = text, members
        self._values_left, self._numbers_left, self._depth = values, numbers, depth
        self._whole = json.JSONDecoder().raw_decode
        self._wrong_until = 0  # end of a piece that json could not parse in one call
        self._member: str | None = None  # the current member of the outermost object

    def decode(self) -> object:
        """Return the text's value.

        Raises JSONDecodeError, TooManyValues, TooDeep, UnknownMember; ValueError for a number with too many digits.
        """
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
        """Decode numbers and literals one piece at a time; the last element of the list is left to `_value`."""
        while at >= self._wrong_until and (comma := self._last_comma(at)) >= 0:
            numbers = self._all_numbers(at, comma)
            if not numbers:  # decode these one by one, to report the exact error
                self._wrong_until = comma
                break
            self._numbers_left -= len(numbers)
            if self._numbers_left < 0:
                raise TooManyValues(self._member)
            values += numbers
            at = comma + 1
        return at

    def _all_numbers(self, at: int, end: int) -> list:
        """Decode a comma-separated piece of numbers; empty if it is not valid JSON."""
        try:
            return json.loads(f"[{self.text[at:end]}]")
        except ValueError:
            return []

    def _last_comma(self, at: int) -> int:
        """Return the index of the last comma with only numbers and literals before it; -1 if there is none."""
        end = at + PIECE
        for other in ('"', "[", "{", "]"):
            next_one = self.text.find(other, at, end)
            end = end if next_one < 0 else next_one
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
        """Return the index of the first character that is not white space."""
        if self._next(at) > " ":
            return at
        while (space := _SPACE.match(self.text, at, at + PIECE)) and space.end() == at + PIECE:
            at += PIECE
        return space.end() if space else at
