"""Structured output: the tokens that may come next in a text that follows a JSON schema or an expression.  Lesson 02.

The `llguidance` library follows the grammar; this module gives it the tokens' bytes and bounds its work. A request's
`Matcher` is advanced by each token that was sampled, so the next token's mask exists only once the last one is known.
"""

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from minillm.errors import InvalidRequest, MissingPackage
from minillm.folders import how_to_install

MAX_GRAMMAR = 1 << 16  # characters of a JSON schema or of a regular expression
KEPT = 64  # compiled grammars kept, the least recently used of which goes first
MOST_MULTIPLE = 10_000  # compiling a number's multiples takes time in proportion to it, and no other limit bounds it
QUOTED = 300  # characters of the library's messages, which may quote the grammar
# Between the parts of a JSON text: a space, or a new line and its indentation. A model cannot go on with them for ever.
JSON_OPTIONS = {"whitespace_pattern": r" |\n {0,32}", "lenient": False}
# Bounds on the library's work. Within them, what we tried took at most 0.3 s to compile and 1 ms a token.
LIMITS = {
    "max_items_in_row": 20_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 70_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


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
        """Why the library gave up: the grammar is wrong, or needs more work than `LIMITS` allow."""
        return str(self._state.get_error())[:QUOTED].strip() or None if self._state.is_error() else None

    def _compute(self) -> np.ndarray:
        return np.frombuffer(self._state.compute_bitmask(), np.uint8)


class Grammars:
    """Compiles grammars for one tokenizer and keeps the last `KEPT`; threads may share it.

    tokenizer: has `encode` and `token_bytes` like `minillm.Tokenizer`, or nothing can be compiled. vocab_size: the
    model's. eos: its end tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Sequence[int]):
        self._given, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos)
        self._tokenizer: Any = None  # llguidance.LLTokenizer, made for the first grammar
        self._kept: OrderedDict[tuple[str, str], Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, kind: str, text: str) -> Matcher:
        """A new matcher, at the grammar's start.

        kind: "json_schema" or "regex"; text: the schema as JSON, or the expression. Raises InvalidRequest if the
        grammar is wrong or too complex, or if the model's tokenizer does not suffice; MissingPackage.
        """
        with self._lock:
            if found := self._kept.get((kind, text)):
                self._kept.move_to_end((kind, text))
                return found.copy()
            tokenizer = self._tokenizer = self._tokenizer or self._make_tokenizer()
        made = _compile(tokenizer, kind, text)
        with self._lock:
            self._kept[kind, text] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return made.copy()

    def _make_tokenizer(self) -> Any:
        if self._given is None:
            raise InvalidRequest("json_schema and regex need a tokenizer, and this model has none: leave them out")
        if not hasattr(self._given, "token_bytes"):
            raise InvalidRequest(
                "json_schema and regex need to know each token's bytes, and the engine's tokenizer has no "
                "token_bytes(id): give it one, as minillm.Tokenizer has, or leave them out"
            )
        if not self._eos:
            raise InvalidRequest(
                "json_schema and regex end with the model's end token, and its config.json has no eos_token_id: add it"
            )
        library = _library()
        described = _Described(self._given, self._vocab_size, self._eos[0])
        return library.LLTokenizer(library.TokenizerWrapper(described), eos_token=self._eos)


class _Described:
    """A tokenizer as the library wants it."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int, eos: int):
        found = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.tokenizer, self.eos_token_id = tokenizer, eos
        self.special_token_ids = [i for i, each in enumerate(found) if each is None]
        # The byte 255 is in no text: the library keeps it for tokens that no grammar of ours allows.
        self.tokens = [b"\xff[%d]" % i if each is None else each for i, each in enumerate(found)]

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        how = how_to_install("minillm[serve]")
        raise MissingPackage(f"json_schema and regex need `llguidance`, which is not installed: {how}") from error
    return llguidance


def _compile(tokenizer: Any, kind: str, text: str) -> Matcher:
    library = _library()
    make = library.LLMatcher
    if kind == "json_schema":
        schema = json.loads(text)
        _check_multiples(schema)
        _close(schema)
        text = json.dumps(schema)
    try:
        if kind == "json_schema":
            grammar = make.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
        else:
            grammar = make.grammar_from_regex(text)
    except ValueError as error:
        raise InvalidRequest(f"{kind} cannot be used: {str(error)[:QUOTED]}") from None
    made = Matcher(make(tokenizer, grammar, log_level=0, limits=library.LLParserLimits(**LIMITS)))
    if made.error is not None:
        raise InvalidRequest(f"{kind} cannot be used: {made.error}")
    return made


# Where a JSON schema has other schemas.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalProperties", "not", "if", "then", "else")
# With these an object has members that its own `properties` do not list.
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref")
_CONDITIONS = ("not", "if", "dependentSchemas")
_OTHERS = ("additionalProperties", "unevaluatedProperties", "patternProperties")


def _close(schema: Any) -> None:
    """Let objects whose schema lists properties and says nothing of others have no others, as vLLM does.

    JSON Schema itself allows any, with which a model may go on as long as it likes. A schema that combines several for
    one object is left as it is.
    """
    parts, left = [], [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            parts.append(part)
            left += [each for name in _MAPS if isinstance(part.get(name), dict) for each in part[name].values()]
            for name in _LISTS:
                left += part[name] if isinstance(part.get(name), list) else [part.get(name)]
    if any(map(_combines, parts)):
        return
    for part in parts:
        if "properties" in part and not any(name in part for name in _OTHERS):
            part["additionalProperties"] = False


def _combines(schema: dict[str, Any]) -> bool:
    """Whether several schemas hold for the same object."""
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    more = "properties" in schema and any(name in schema for name in _COMBINED)
    return several or more or any(name in schema for name in _CONDITIONS)


def _check_multiples(schema: Any) -> None:
    """Raise InvalidRequest if `multipleOf` would take long to compile. Several may hold for the same number."""
    least, left = 1, [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            left += part.values()
            number = part.get("multipleOf")
            if isinstance(number, (int, float)) and number > 0:
                exact = Decimal(str(number)).normalize()
                least = math.lcm(least, int(exact.scaleb(max(0, -int(exact.as_tuple().exponent)))))
    if least > MOST_MULTIPLE:
        raise InvalidRequest(
            f"json_schema cannot be used: the least common multiple of all its multipleOf, without their decimal "
            f"points, is above {MOST_MULTIPLE:,}; leave some out and check the numbers yourself"
        )
