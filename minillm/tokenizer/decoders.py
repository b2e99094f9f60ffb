"""Decoders: tokens back to text, one token at a time.  Lesson 01.

Every decoder of `tokenizer.json` is a stage that takes pieces and returns the text that can no longer change. It holds
back the rest (half a character, a run of byte tokens, a space that may be stripped at the end) until `finish`. Lists
and streams of tokens are decoded by the same code, so their texts are equal.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence

import regex

from .patterns import Spec, component, replacer
from .pre_tokenizers import BYTE_CHARACTERS, prepend_scheme

_BYTES = {character: byte for byte, character in BYTE_CHARACTERS.items()}
_BYTE_TOKEN = regex.compile(r"<0x([0-9A-Fa-f]{2})>")


class Stage:
    """One decoder. `push` and `finish` return the pieces that are final; with `fuses`, these form a single piece."""

    fuses = False

    def push(self, piece: str) -> list[str]:
        return [piece]

    def finish(self) -> list[str]:
        return []


class Decoder:
    """The text of one sequence of tokens; make a new one for each sequence.  Lesson 01."""

    def __init__(self, spec: Spec | None) -> None:
        self._stages: list[Stage] = []
        fused = False
        for step in _flatten(spec) if spec else [{"type": "JoinWithSpaces"}]:
            stage: Stage = component("decoder", step, _STAGES)
            if fused:
                stage = _StripEnds(stage) if isinstance(stage, _Strip) else _Whole(stage)
            self._stages.append(stage)
            fused = fused or stage.fuses

    def push(self, tokens: Iterable[str]) -> str:
        """The text that is final after these tokens, possibly empty."""
        return self._run(tokens, last=False)

    def finish(self) -> str:
        """The text that was held back."""
        return self._run([], last=True)

    def _run(self, tokens: Iterable[str], last: bool) -> str:
        pieces = tokens
        for stage in self._stages:
            pieces = [out for piece in pieces for out in stage.push(piece)]
            if last:
                pieces += stage.finish()
        return "".join(pieces)


def tokens_bytes(spec: Spec | None, tokens: Sequence[str]) -> list[bytes]:
    """The bytes that each token adds inside a text. Byte tokens and byte-level tokens may hold parts of a character."""
    kinds = {step["type"] for step in _flatten(spec)} if spec else set()
    found: dict[str, bytes] = {}
    for token in tokens:
        if "ByteFallback" in kinds and (byte := _BYTE_TOKEN.fullmatch(token)):
            found[token] = bytes.fromhex(byte[1])
        elif "ByteLevel" in kinds and all(character in _BYTES for character in token):
            found[token] = bytes(map(_BYTES.__getitem__, token))
    # All others in one text, with a mark around each: a decoder may change the start and the end of a text.
    others = [token for token in dict.fromkeys(tokens) if token not in found]
    taken = {*"".join(others)}
    mark = next(character for character in map(chr, range(0xE000, 0xF900)) if character not in taken)
    decoder = Decoder(spec)
    text = decoder.push([mark, *(piece for token in others for piece in (token, mark))]) + decoder.finish()
    between = Decoder(spec)
    gap = len(between.push([mark, mark]) + between.finish()) - 2  # what joins two tokens without a decoder
    decoded = text.split(mark)[1:-1]
    found |= {token: each[: len(each) - gap].encode() for token, each in zip(others, decoded, strict=True)}
    return [found[token] for token in tokens]


def _flatten(spec: Spec) -> list[Spec]:
    if spec["type"] != "Sequence":
        return [spec]
    return [step for inner in spec["decoders"] for step in _flatten(inner)]


class _JoinWithSpaces(Stage):
    def __init__(self, spec: Spec) -> None:
        self.first = True

    def push(self, piece: str) -> list[str]:
        self.first, first = False, self.first
        return [piece if first else " " + piece]


class _Replace(Stage):
    def __init__(self, spec: Spec) -> None:
        self.replace = replacer(spec)

    def push(self, piece: str) -> list[str]:
        return [self.replace(piece)]


class _Fuse(Stage):
    fuses = True

    def __init__(self, spec: Spec) -> None:
        pass


class _Whole(Stage):
    """A stage after a Fuse: it needs the whole piece, so it waits for the end."""

    fuses = True

    def __init__(self, stage: Stage) -> None:
        self.stage, self.text = stage, ""

    def push(self, piece: str) -> list[str]:
        self.text += piece
        return []

    def finish(self) -> list[str]:
        return [*self.stage.push(self.text), *self.stage.finish()]


class _ByteFallback(Stage):
    """<0xE2><0x82><0xAC> -> "€". A run of byte tokens with an invalid byte becomes one "\ufffd" for each byte, as in
    the `tokenizers` library; so a run is final only when it ends."""

    def __init__(self, spec: Spec) -> None:
        self.run = bytearray()

    def push(self, piece: str) -> list[str]:
        byte = _BYTE_TOKEN.fullmatch(piece) if len(piece) == 6 else None
        if byte:
            self.run += bytes.fromhex(byte[1])
            return []
        if not self.run:
            return [piece]
        return [*self.finish(), piece]

    def finish(self) -> list[str]:
        run, self.run = self.run, bytearray()
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


class _ByteLevel(Stage):
    fuses = True

    def __init__(self, spec: Spec) -> None:
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, piece: str) -> list[str]:
        known = all(character in _BYTES for character in piece)
        return [self.utf8.decode(bytes(map(_BYTES.__getitem__, piece)) if known else piece.encode())]

    def finish(self) -> list[str]:
        return [self.utf8.decode(b"", final=True)]


class _Metaspace(Stage):
    def __init__(self, spec: Spec) -> None:
        self.mark = spec["replacement"]
        self.drops = prepend_scheme(spec) != "never"  # the first token's mark was added by the encoding

    def push(self, piece: str) -> list[str]:
        self.drops, drops = False, self.drops
        return [piece.replace(self.mark, "" if drops else " ")]


class _Strip(Stage):
    """Removes the character `content` from every piece, up to `start` times at its start and `stop` at its end."""

    def __init__(self, spec: Spec) -> None:
        self.content, self.start, self.stop = spec["content"], spec["start"], spec["stop"]

    def push(self, piece: str) -> list[str]:
        for _ in range(self.start):
            piece = piece.removeprefix(self.content)
        for _ in range(self.stop):
            piece = piece.removesuffix(self.content)
        return [piece]


class _StripEnds(Stage):
    """A Strip after a Fuse: strips the whole text's start and end. Llama 2 ends with one, and must still stream."""

    fuses = True

    def __init__(self, strip: _Strip) -> None:
        self.content, self.start, self.stop = strip.content, strip.start, strip.stop
        self.held = ""

    def push(self, piece: str) -> list[str]:
        while self.start and piece.startswith(self.content):
            piece = piece.removeprefix(self.content)
            self.start -= 1
        if piece:
            self.start = 0
        text = self.held + piece
        tail = min(len(text) - len(text.rstrip(self.content)), self.stop)
        self.held = text[len(text) - tail :]
        return [text[: len(text) - tail]]


_STAGES: dict[str, Callable[[Spec], Stage]] = {
    "Replace": _Replace,
    "ByteFallback": _ByteFallback,
    "Fuse": _Fuse,
    "ByteLevel": _ByteLevel,
    "Metaspace": _Metaspace,
    "Strip": _Strip,
    "JoinWithSpaces": _JoinWithSpaces,
}
