"""A request's text while it is being generated, and the stop strings that end it.  Lesson 01."""

from collections.abc import Sequence

from minillm.tokenizer import StreamingDetokenizer, Tokenizer


class OutputText:
    """Turns a request's tokens into text, each character once, up to the first stop string.

    A stop string ends the text as soon as it is complete; if one token completes several, the one that begins first
    counts. One that the first min_tokens tokens complete is text like any other. Text that may be the beginning of a
    stop string is held back.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0):
        self.text = ""  # all so far, what is held back included
        self.stop_string: str | None = None  # that ended it
        self._detokenizer = StreamingDetokenizer(tokenizer)
        self._stop, self._min_tokens = stop, min_tokens
        self._tokens = 0
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
        before = len(self.text)
        self.text += new
        found = _first_stop(self.text, before, self._stop) if self._tokens > self._min_tokens else None
        if found is None:
            return False
        place, self.stop_string = found
        self.text, self._ended = self.text[:place], True
        return True

    @property
    def _safe(self) -> int:
        """Characters that are text whatever comes."""
        if self._ended:
            return len(self.text)
        return len(self.text) - max((_overlap(self.text, string) for string in self._stop), default=0)


def _first_stop(text: str, before: int, stop: Sequence[str]) -> tuple[int, str] | None:
    """Where the earliest stop string begins that ends after `before` characters, and which it is."""
    found = [(text.find(string, max(0, before - len(string) + 1)), string) for string in stop]
    return min((pair for pair in found if pair[0] >= 0), default=None)


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` with which `string` begins."""
    start = max(0, len(text) - len(string) + 1)
    while (start := text.find(string[0], start)) >= 0:
        if string.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
