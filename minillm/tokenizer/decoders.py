"""Decoders: tokens back to text, one token at a time.  Lesson 01.

Every decoder of `tokenizer.json` is a stage that takes pieces and returns the text that can no longer change. It holds
back the rest (half a character, a run of byte tokens, a space that may be stripped at the end) until `finish`. Lists
and streams of tokens are decoded by the same code, so their texts are equal.
"""

import codecs
import copy
from collections.abc import Callable, Iterable, Sequence, Sized
from operator import methodcaller

import regex

from .patterns import Spec, component, replacer
from .pre_tokenizers import BYTE_CHARACTERS, prepend_scheme

_BYTES = {character: byte for byte, character in BYTE_CHARACTERS.items()}
_BYTE_TOKEN = regex.compile(r"<0x([0-9A-Fa-f]{2})>")


class Stage:
    """One decoder. `push` and `finish` return the pieces that are final; with `fuses`, these form a single piece.

    `settle` gives up the complete characters that are held back only because a broken byte could follow.
    """

    fuses = False
    held: Sized = ""  # what is held back

    def push(self, piece: str) -> list[str]:
        return [piece]

    def finish(self) -> list[str]:
        return []

    def settle(self) -> list[str]:
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
        """Return the text that is final after these tokens, possibly empty."""
        return self._run(tokens)

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._run([], methodcaller("finish"))

    def settle(self) -> str:
        """Return the characters that are complete, but held back because a broken byte could follow: do not wait for
        it.
        """
        return self._run([], methodcaller("settle"))

    def peek(self, end: str = "settle") -> str:
        """Return what `settle` (or "finish") would, while still holding it back."""
        if not any(stage.held for stage in self._stages):
            return ""
        twin = copy.copy(self)
        twin._stages = [copy.copy(stage) for stage in self._stages]
        return twin._run([], methodcaller(end))

    @property
    def needs_all(self) -> bool:
        """Return whether a token's text may depend on any earlier token, however far back."""
        return any(isinstance(stage, _Whole) for stage in self._stages)

    def _run(self, tokens: Iterable[str], end: Callable[[Stage], list[str]] = lambda stage: []) -> str:
        pieces = tokens
        for stage in self._stages:
            pieces = [out for piece in pieces for out in stage.push(piece)] + end(stage)
        return "".join(pieces)


def byte_of(token: str) -> bytes | None:
    """Return the byte that a token like "<0xE2>" stands for, None for other tokens."""
    match = _BYTE_TOKEN.fullmatch(token) if len(token) == 6 else None
    return bytes.fromhex(match[1]) if match else None


def tokens_bytes(spec: Spec | None, tokens: Sequence[str]) -> list[bytes]:
    """Return the bytes that each token adds inside a text. Byte tokens and byte-level tokens may hold parts of a
    character.
    """
    steps = _flatten(spec) if spec else []
    kinds = {step["type"] for step in steps}
    by_token: dict[str, bytes] = {}
    if "ByteFallback" in kinds:
        by_token = {token: byte for token in tokens if len(token) == 6 and (byte := byte_of(token)) is not None}
    if "ByteLevel" in kinds:
        for token in tokens:
            if token not in by_token and all(character in _BYTES for character in token):
                by_token[token] = bytes(map(_BYTES.__getitem__, token))
    # All others in one text, with a mark around each: a decoder may change the start and the end of a text.
    others = [token for token in tokens if token not in by_token]
    joined = "".join(others)
    mark = next(character for character in map(chr, range(0xE000, 0xF900)) if character not in joined)
    pieces = [mark, *(piece for token in others for piece in (token, mark))]
    if steps and all(map(_ignores_bounds, steps)):
        pieces = ["".join(pieces)]  # the same text, sooner
    gap = len(_decoded(spec, [mark, mark])) - 2 * len(mark.encode())  # bytes that join two tokens without a decoder
    decoded = (each[: len(each) - gap] for each in _decoded(spec, pieces).split(mark.encode())[1:-1])
    return [by_token[token] if token in by_token else next(decoded) for token in tokens]


def _decoded(spec: Spec | None, tokens: Sequence[str]) -> bytes:
    decoder = Decoder(spec)
    return (decoder.push(tokens) + decoder.finish()).encode()


def _ignores_bounds(step: Spec) -> bool:
    """Return whether the bounds between tokens do not change the text, once the byte tokens are gone."""
    kind = step["type"]
    return kind in ("ByteFallback", "Fuse") or (kind == "Replace" and bool(step["pattern"].get("String")))


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
        self.stage = stage
        self.held: str = ""

    def push(self, piece: str) -> list[str]:
        self.held += piece
        return []

    def finish(self) -> list[str]:
        stage = copy.copy(self.stage)
        return [*stage.push(self.held), *stage.finish()]


class _ByteFallback(Stage):
    """<0xE2><0x82><0xAC> -> "€". A run of byte tokens with an invalid byte becomes one "\ufffd" for each byte, as in
    the `tokenizers` library; so a run is final only when it ends."""

    def __init__(self, spec: Spec) -> None:
        self.held: bytearray = bytearray()  # the run
        self.broken = False  # whether `settle` returned a part of this run that has an invalid byte

    def push(self, piece: str) -> list[str]:
        byte = byte_of(piece)
        if byte:
            self.held += byte
            return []
        if not self.held and not self.broken:
            return [piece]
        return [*self.finish(), piece]

    def finish(self) -> list[str]:
        run, broken = self.held, self.broken
        self.held, self.broken = bytearray(), False
        try:
            if not broken:
                return [run.decode()] if run else []
        except UnicodeDecodeError:
            pass
        return ["\ufffd"] * len(run)

    def settle(self) -> list[str]:
        try:
            if not self.broken:
                text, complete = codecs.utf_8_decode(self.held)  # what follows is the start of a character
                self.held = self.held[complete:]
                return [text] if text else []
        except UnicodeDecodeError:
            pass
        replaced = self.finish()
        self.broken = True
        return replaced


class _ByteLevel(Stage):
    fuses = True

    def __init__(self, spec: Spec) -> None:
        self.held: bytes = b""  # the start of a character

    def push(self, piece: str) -> list[str]:
        known = all(character in _BYTES for character in piece)
        data = self.held + (bytes(map(_BYTES.__getitem__, piece)) if known else piece.encode())
        text, complete = codecs.utf_8_decode(data, "replace")
        self.held = data[complete:]
        return [text]

    def finish(self) -> list[str]:
        return [self.held.decode(errors="replace")]


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
        self.held: str = ""

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
