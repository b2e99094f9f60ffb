"""A request's text while it is being generated, and the stop strings that end it.  Lesson 01."""

from collections.abc import Sequence

from minillm.tokenizer import StreamingDetokenizer, Tokenizer


class OutputText:
    """Turns a request's tokens into text, each character once, up to the first stop string.

    A stop string ends the text as soon as it is complete and min_tokens tokens are there; if one token completes
    several, the one that begins first counts. Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0):
        self.text = ""  # all so far, what is held back included
        self.stop_string: str | None = None  # that ended it
        self._detokenizer = StreamingDetokenizer(tokenizer)
        self._stop, self._min_tokens = stop, min_tokens
        self._longest = max(map(len, stop), default=0)
        self._tokens = 0
        self._found: tuple[int, str] | None = None  # where a stop string begins, and which
        self._given = 0  # characters that `new` gave
        self._ended = False

    def add(self, ids: Sequence[int], reason: str | None = None) -> int:
        """Take new tokens; returns how many belong to the output: none after the one that completes a stop string.

        reason: why the last of them is the last, "stop" where it is a stop token, which is no part of the text.
        """
        if not self._stop:
            self.text += self._detokenizer.add(ids[:-1] if reason == "stop" else ids)
        for count, token in enumerate(ids if self._stop else (), 1):
            last = reason is not None and count == len(ids)
            text = "" if last and reason == "stop" else self._detokenizer.add([token])
            if self._completes_stop(text + self._detokenizer.flush() if last else text):
                return count
        if reason is not None:
            self.end()
        return len(ids)

    def end(self) -> None:
        """There are no more tokens: what was held back is text."""
        if not self._ended:
            self.text += self._detokenizer.flush()
            self._ended = True

    def new(self) -> str:
        """Text since the last call, without an ending that may become a stop string."""
        start, self._given = self._given, self._safe
        return self.text[start : self._given]

    def _completes_stop(self, new: str) -> bool:
        """Take one token's text, and say whether a stop string ends the output."""
        self._tokens += 1
        start = max(0, len(self.text) - self._longest + 1)  # no stop string that is not complete yet begins before
        self.text += new
        found = _first_stop(self.text, start, self._stop)
        if found is not None:
            self._found = found if self._found is None else min(self._found, found)
        if self._found is None or self._tokens < self._min_tokens:
            return False
        place, self.stop_string = self._found
        self.text, self._ended = self.text[:place], True
        return True

    @property
    def _safe(self) -> int:
        """Characters that are text whatever comes."""
        if self._ended:
            return len(self.text)
        safe = len(self.text) - max((_overlap(self.text, string) for string in self._stop), default=0)
        return safe if self._found is None else min(safe, self._found[0])


def _first_stop(text: str, start: int, stop: Sequence[str]) -> tuple[int, str] | None:
    """Where the earliest stop string begins, looking from `start` on, and which it is."""
    found = [(text.find(string, start), string) for string in stop]
    return min((pair for pair in found if pair[0] >= 0), default=None)


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` with which `string` begins."""
    start = max(0, len(text) - len(string) + 1)
    while (start := text.find(string[0], start)) >= 0:
        if string.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
