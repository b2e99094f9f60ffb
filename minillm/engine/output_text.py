"""A request's text while it is being generated, and the stop strings that end it.  Lesson 01."""

import os.path
from collections.abc import Sequence

from minillm.tokenizer import StreamingDetokenizer, Tokenizer


class OutputText:
    """Turns a request's tokens into text, each character once, up to the first stop string.

    The text is the one that prompt and output have together, without the prompt's: see `StreamingDetokenizer`. A stop
    string ends the text as soon as it is complete; if one token completes several, the one that begins first counts.
    A stop string that the first min_tokens tokens complete is ignored. Text that may be the beginning of a stop
    string is held back.

    prompt      the ids that the output follows
    echoed      whether the prompt's text is given with the output's, which then has any character that both share
    locates     whether to keep `offsets`: where each token's text begins in the text. A token that completes no
                character begins where the next character does
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        prompt: Sequence[int] = (),
        echoed: bool = False,
        locates: bool = False,
    ):
        self.text = ""  # all so far, what is held back included
        self.stop_string: str | None = None  # that ended it
        self.offsets: list[int] | None = [] if locates else None
        self._detokenizer = StreamingDetokenizer(tokenizer, after=prompt, keeps_rest=echoed)
        self._stop, self._min_tokens = stop, min_tokens
        self._pending = ""  # complete characters that a broken byte could still change
        self._tokens = 0
        self._returned = 0  # characters that `new` has returned
        self._ended = False

    def add(self, ids: Sequence[int], reason: str | None = None) -> int:
        """Take new tokens; returns how many belong to the output: none after the one that completes a stop string.

        reason: why the output ends with them, None if it does not. "stop": the last is a stop token and adds no text.
        """
        one_by_one = bool(self._stop) or self.offsets is not None
        if not one_by_one:
            self.text += self._detokenizer.add(ids[:-1] if reason == "stop" else ids)
        for count, token in enumerate(ids if one_by_one else (), 1):
            last = reason is not None and count == len(ids)
            if self.offsets is not None:
                self.offsets.append(len(self.text) + len(self._pending))
            text = "" if last and reason == "stop" else self._detokenizer.add([token])
            if self._completes_stop(text + self._detokenizer.flush() if last else text):
                return count
        if reason is not None:
            self.end()
        return len(ids)

    def end(self) -> None:
        """Release the text that was held back, because no more tokens follow."""
        if not self._ended:
            self.text += self._detokenizer.flush()
            self._ended = True

    def new(self) -> str:
        """Return text since the last call, without an ending that may become a stop string."""
        start, self._returned = self._returned, self._safe
        return self.text[start : self._returned]

    def _completes_stop(self, new: str) -> bool:
        """Take one token's text, and say whether a stop string ends the output."""
        self._tokens += 1
        seen, before, pending = len(self.text), self._pending, self._detokenizer.pending
        self.text, self._pending = self.text + new, pending
        if not self._stop:
            return False
        # All that is complete, as if no more tokens came: if one of them breaks the run of bytes, it changes.
        after = new + pending
        seen += len(before if after.startswith(before) else os.path.commonprefix((before, after)))
        text = self.text + pending
        earliest = _first_stop(text, seen, self._stop) if self._tokens > self._min_tokens else None
        if earliest is None:
            return False
        start, self.stop_string = earliest
        self.text, self._ended = text[:start], True
        return True

    @property
    def _safe(self) -> int:
        """Count the characters that later tokens cannot turn into a stop string."""
        if self._ended:
            return len(self.text)
        return len(self.text) - max((_overlap(self.text, string) for string in self._stop), default=0)


def _first_stop(text: str, before: int, stop: Sequence[str]) -> tuple[int, str] | None:
    """Find the earliest stop string that ends after `before` characters: its start and itself."""
    starts = [(text.find(string, max(0, before - len(string) + 1)), string) for string in stop]
    return min((pair for pair in starts if pair[0] >= 0), default=None)


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` with which `string` begins."""
    start = max(0, len(text) - len(string) + 1)
    while (start := text.find(string[0], start)) >= 0:
        if string.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
