"""Matchers, which know the tokens that may come next, and the grammars that they are compiled from.  Lesson 02.

A request's `Matcher` is advanced by each token that was sampled, so the next token's mask exists only once the last one
is known.
"""

import contextlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from minillm.errors import InvalidRequest, MissingPackage
from minillm.folders import how_to_install

from . import schema
from .vocabulary import Vocabulary

MAX_GRAMMAR = 1 << 16  # characters of a JSON schema; expressions have a lower limit (`schema`)
KEPT = 64  # compiled grammars kept, the least recently used of which goes first
QUOTED = 300  # characters of the library's messages, which may quote the grammar
# Bounds on the library's work. Within them, what we tried took at most 0.8 s to compile and 1 ms a token.
LIMITS = {
    "max_items_in_row": 20_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 70_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
JSON_CHARACTERS = "".join(map(chr, range(0x20, 0x7F)))  # the tokens that a vocabulary must have for JSON
DEAD_END = "no token of this model can come next"


class Matcher:
    """One request's place in its grammar.

    mask: [bytes] uint8, one bit a token of the vocabulary, lowest bits first: 1 where the token may come next. In a
    complete text with nothing to add these are the model's end tokens alone.
    """

    def __init__(self, state: Any, mask: np.ndarray | None = None):
        self._state = state  # llguidance.LLMatcher
        self.mask = self._compute() if mask is None else mask

    def copy(self) -> "Matcher":
        return Matcher(self._state.deep_copy(), self.mask)

    def advance(self, tokens: Sequence[int]) -> str | None:
        """Take in the tokens that were sampled; returns why the grammar cannot go on, or None."""
        self._state.consume_tokens(list(tokens))
        self.mask = self._compute()
        return self.error

    @property
    def error(self) -> str | None:
        """Return why the library gave up: the grammar is wrong, or needs more work than `LIMITS` allow."""
        return said(self._state.get_error()) if self._state.is_error() else None

    def _compute(self) -> np.ndarray:
        return np.frombuffer(self._state.compute_bitmask(), np.uint8)


def said(message: str) -> str:
    """Return what the library says, on one line."""
    text = " ".join(re.sub(r"\s+while processing \S+|<non-verbose/>", "", message).split())
    return DEAD_END if text.startswith("NoExtension") else text[:QUOTED]


class Grammars:
    """Compiles grammars for one tokenizer and keeps the last `KEPT`; threads may share it.

    tokenizer: has `encode` and `token_bytes` like `minillm.Tokenizer`, or nothing can be compiled. vocab_size: the
    model's. eos: its end tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Sequence[int]):
        self._model_tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos)
        self._made: tuple[Vocabulary, Any] | None = None  # with its llguidance.LLTokenizer
        self._making = threading.Lock()
        self._thread: threading.Thread | None = None
        self._kept: OrderedDict[tuple[str, str], Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def make_tokenizer_in_background(self) -> None:
        """Begin to make what all grammars share, so that the first one need not: 1 to 2 s of work for 262,144 tokens.

        The library holds Python's global lock for most of it, so call this before the engine takes steps. A failure
        shows when a grammar is asked for.
        """

        def make() -> None:
            with contextlib.suppress(Exception):
                self._tokenizer()

        self._thread = threading.Thread(target=make, name="minillm-vocabulary", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until what was begun is made, or has failed."""
        if self._thread is not None:
            self._thread.join()

    def matcher(self, kind: str, text: str) -> Matcher:
        """Return a new matcher, at the grammar's start.

        kind: "json_schema" or "regex"; text: the schema as JSON, or the expression. Raises InvalidRequest if the
        grammar is wrong or too complex, or if the model's tokenizer does not suffice; MissingPackage.
        """
        with self._lock:
            if matcher := self._kept.get((kind, text)):
                self._kept.move_to_end((kind, text))
                return matcher.copy()
        try:
            made = _compile(*self._tokenizer(), kind, text)
        except RecursionError:
            raise InvalidRequest(f"{kind} cannot be used: it is nested too deeply") from None
        except BaseException as error:  # a panic of the library is no Exception, and would end the server's thread
            if type(error).__module__ != "pyo3_runtime":
                raise
            raise InvalidRequest(f"{kind} cannot be used: llguidance fails on it: {said(str(error))}") from None
        with self._lock:
            self._kept[kind, text] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return made.copy()

    def _tokenizer(self) -> tuple[Vocabulary, Any]:
        with self._making:  # a request that comes while it is being made waits for it
            self._made = self._made or self._make_tokenizer()
            return self._made

    def _make_tokenizer(self) -> tuple[Vocabulary, Any]:
        if self._model_tokenizer is None:
            raise InvalidRequest("json_schema and regex need a tokenizer, and this model has none: leave them out")
        if not hasattr(self._model_tokenizer, "token_bytes"):
            raise InvalidRequest(
                "json_schema and regex need to know each token's bytes, and the engine's tokenizer has no "
                "token_bytes(id): give it one, as minillm.Tokenizer has, or leave them out"
            )
        if not self._eos:
            raise InvalidRequest(
                "json_schema and regex end with the model's end token, and its config.json has no eos_token_id: add it"
            )
        library = _library()
        vocabulary = Vocabulary(self._model_tokenizer, self._vocab_size, self._eos)
        return vocabulary, library.LLTokenizer(vocabulary, eos_token=self._eos)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        how = how_to_install("minillm[serve]")
        raise MissingPackage(f"json_schema and regex need `llguidance`, which is not installed: {how}") from error
    return llguidance


def _compile(vocabulary: Vocabulary, tokenizer: Any, kind: str, text: str) -> Matcher:
    library = _library()
    limits = library.LLParserLimits(**LIMITS)
    if kind == "regex" and (why := schema.too_large(text)):
        raise InvalidRequest(f"regex {why}")
    parsed = schema.prepared(json.loads(text), library) if kind == "json_schema" else None
    if parsed is not None and not vocabulary.complete:
        for pointer, each in (("#", JSON_CHARACTERS), *schema.literals(parsed)):
            if missing := vocabulary.missing(each):
                raise schema.refusal(pointer, f"this model's vocabulary has no token for {missing!r}")
    try:
        made = library.LLMatcher.grammar_from_regex(text) if parsed is None else schema.grammar(parsed, library)
    except ValueError as error:
        raise InvalidRequest(f"{kind} cannot be used: {said(str(error))}") from None
    if not vocabulary.complete:
        made = _without_forcing(made, library)
    matcher = Matcher(library.LLMatcher(tokenizer, made, log_level=0, limits=limits))
    if matcher.error is not None and parsed is not None:

        def refused(part: Any) -> str | None:
            return said(library.LLMatcher.validate_grammar(schema.grammar(part, library), limits=limits)) or None

        raise schema.blame(parsed, matcher.error, refused)
    if matcher.error is not None:
        raise InvalidRequest(f"{kind} cannot be used: {matcher.error}")
    return matcher


def _without_forcing(grammar: str, library: Any) -> str:
    """Return the grammar with masks that are computed from the tokens' bytes alone."""
    (only,) = json.loads(grammar)["grammars"]
    text = only.get("lark_grammar") or f"start: %json {json.dumps(only['json_schema'])}"
    return str(library.LLMatcher.grammar_from_lark('%llguidance {"no_forcing": true}\n' + text))
