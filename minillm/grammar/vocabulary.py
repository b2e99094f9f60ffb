"""A model's vocabulary as bytes, in the form that `llguidance` reads.  Lesson 02."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

SPECIAL = b"\xff"  # in no text: the library keeps it for tokens that no grammar of ours allows
IN_TEXT = {*range(0xF5)} - {0xC0, 0xC1}  # the bytes that occur in UTF-8 (RFC 3629, section 4)


class Vocabulary:
    """The bytes of each token, and the tokens of a text that a grammar requires.

    Where only one text can come next, the library asks for its tokens and allows the first one alone, so that the model
    sees a text as it was trained on it.

    tokenizer: has `encode`, and `tokens_bytes` or `token_bytes`, like `minillm.Tokenizer`. eos: the model's end tokens.
    complete: whether there is a token for each byte that a text may have. If not, only tokens of whole characters are
    allowed, and some texts have no tokens at all, so the library must not ask for them.
    """

    # What the library reads of a tokenizer. Its own TokenizerWrapper would encode a text to try the tokenizer out.
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Sequence[int]) -> None:
        many = getattr(tokenizer, "tokens_bytes", None)
        texts = many(range(vocab_size)) if many else [tokenizer.token_bytes(id) for id in range(vocab_size)]
        for id in eos:  # they end a text, even if the tokenizer takes them for plain text
            texts[id] = None
        self.complete = {bytes([byte]) for byte in IN_TEXT} <= {*texts}
        if not self.complete:  # a part of a character would be allowed, and its rest might have no token
            texts = [None if each is None or not _is_text(each) else each for each in texts]
        self.eos_token_id = eos[0]
        self.special_token_ids = [id for id, each in enumerate(texts) if each is None]
        self.tokens = [SPECIAL + b"[%d]" % id if each is None else each for id, each in enumerate(texts)]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        """Return tokens whose bytes, joined, are those of `text`: the tokenizer's own if possible.

        A tokenizer may put a space before a text, normalize it, or take parts of it for special tokens. After a line
        break it encodes a text as the inside of a longer one. If that changes the text too, the longest tokens are
        taken, from left to right.
        """
        data = text.encode()
        for before in ("", "\n"):
            ids = self._last(self._encode(before + text, add_special_tokens=False), len(data))
            if b"".join(self.tokens[id] for id in ids) == data:
                return ids
        return self._longest_match(data)

    def missing(self, text: str) -> str | None:
        """Return the first character of `text` without a token of its own."""
        return next((character for character in text if character.encode() not in self._ids), None)

    def _last(self, ids: list[int], length: int) -> list[int]:
        """As many of the last tokens as have `length` bytes."""
        start = len(ids)
        while start and length > 0:
            start -= 1
            length -= len(self.tokens[ids[start]])
        return ids[start:]

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {each: id for id, each in enumerate(self.tokens)}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.tokens))

    def _longest_match(self, data: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next(end for end in ends if data[start:end] in self._ids)
            ids.append(self._ids[data[start:end]])
            start = end
        return ids


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
