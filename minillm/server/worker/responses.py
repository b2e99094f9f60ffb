"""Format responses as OpenAI does: completions, chat completions, their chunks and log-probabilities.  Lesson 99."""

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from json.encoder import encode_basestring as quoted
from typing import Any, NamedTuple

from pydantic_core import PydanticSerializationError, to_json

from minillm.request import Completion, Delta, TokenLogprobs

from ..token_texts import LOWEST, TokenTexts


def dumps(content: dict) -> str:
    """Return compact JSON. Raises ValueError for NaN and infinity, which JSON has not."""
    try:
        quick = to_json(content)
        if b"NaN" not in quick and b"Infinity" not in quick:  # a text, or what it writes for such numbers
            return quick.decode()
    except PydanticSerializationError:  # it refuses lone surrogates, which a client's text may have
        pass
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def usage(prompts: Iterable[Completion], completion_tokens: int) -> dict:
    """Return OpenAI's usage. prompts: the first choice of each prompt."""
    prompt_tokens, cached = 0, 0
    for each in prompts:
        prompt_tokens += len(each.prompt_token_ids)
        cached += min(each.num_cached_tokens, len(each.prompt_token_ids))  # not a soft prompt before it
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass
class Answer:
    """The envelope of a response: its id, time, and model, repeated in each chunk of a stream."""

    kind: str  # "text_completion" or "chat.completion"
    model: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'cmpl' if self.kind == 'text_completion' else 'chatcmpl'}-{uuid.uuid4().hex}"

    def whole(self, choices: list[dict], prompts: Iterable[Completion], completion_tokens: int) -> dict:
        return self._wrap(self.kind, choices) | {"usage": usage(prompts, completion_tokens)}

    def chunk(self, choices: list[dict], **rest: Any) -> dict:
        kind = "chat.completion.chunk" if self.kind == "chat.completion" else self.kind
        return self._wrap(kind, choices) | rest

    @cached_property
    def opening(self) -> str:
        """Return the JSON of a chunk up to its first choice."""
        return dumps(self.chunk([])).removesuffix("]}")

    def _wrap(self, kind: str, choices: list[dict]) -> dict:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def completion_logprobs(
    texts: TokenTexts,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    top: int,
    offsets: Sequence[int] | None = None,
    begun: bool = False,
) -> dict:
    """Return the completions format: parallel lists with one item per token.

    offsets: where each token begins in the text, None if these are all of its tokens. begun: whether other tokens of
    the text come before these.
    """
    form: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    form["text_offset"] += texts.offsets(tokens) if offsets is None else offsets
    for token, entry, first in zip(tokens, logprobs, texts.firsts(tokens, begun), strict=True):
        form["tokens"].append(texts(token, first))
        form["token_logprobs"].append(None if entry is None else max(entry[token], LOWEST))
        form["top_logprobs"].append(None if entry is None else _by_string(texts, entry, token, top, first))
    return form


def _by_string(texts: TokenTexts, entry: TokenLogprobs, token: int, top: int, first: bool) -> dict[str, float]:
    """Return the likeliest tokens' log-probabilities, and the chosen one's. Of tokens with the same string, one has it
    as its name, the chosen one if it is among them; the others are named by their ids, so that none is lost.
    """
    ranked = _likeliest(entry, top)
    ranked.setdefault(token, entry[token])
    strings = [texts(each, first) for each in ranked]
    if len(set(strings)) < len(strings):
        owners = {texts(token, first): token}
        for string, each in zip(strings, ranked, strict=True):
            owners.setdefault(string, each)
        strings = [s if owners[s] == each else f"token_id:{each}" for s, each in zip(strings, ranked, strict=True)]
    return {string: max(logprob, LOWEST) for string, logprob in zip(strings, ranked.values(), strict=True)}


def chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int, begun: bool = False
) -> dict:
    """Return the chat format: a list of tokens, each with the likeliest tokens at its position. begun: as above."""
    content = []
    for token, entry, first in zip(tokens, logprobs, texts.firsts(tokens, begun), strict=True):
        rivals = [texts.entry(each, logprob, first) for each, logprob in _likeliest(entry, top).items()]
        content.append(texts.entry(token, entry[token], first) | {"top_logprobs": rivals})
    return {"content": content, "refusal": None}


def _likeliest(entry: TokenLogprobs, top: int) -> dict[int, float]:
    return {token: entry[token] for token in sorted(entry, key=entry.__getitem__, reverse=True)[:top]}


def _ids(gained: Delta) -> str:
    """Return the JSON of the token ids, as a choice's last member."""
    return f',"token_ids":[{",".join(map(str, gained.token_ids))}]'


class Echo(NamedTuple):
    """A prompt's text."""

    text: str
    written: bool  # by the client, who may instead have sent token ids


@dataclass
class CompletionForm:
    """Formats the choices of /v1/completions, whole or in pieces. A whole choice is a single piece.

    top: how many of the likeliest tokens to report, None for no log-probabilities; ids: whether to report token ids;
    n: choices of each prompt; echoes: of the prompts, sent before the output, None for none; scores_only: omit
    everything generated.
    """

    texts: TokenTexts
    top: int | None
    ids: bool
    n: int
    echoes: list[Echo] | None = None
    scores_only: bool = False
    begun: dict[int, bool] = field(default_factory=dict)  # per choice that has started: whether its text has
    located: dict[int, list[int]] = field(default_factory=dict)  # per prompt: where its tokens begin in its echo
    kind = "text_completion"

    def openings(self, count: int) -> list[dict]:
        return []

    def whole_answer(self, done: Sequence[Completion]) -> dict:
        """Return what an answer has next to its choices."""
        return {}

    def whole(self, index: int, done: Completion) -> dict:
        reason, offsets = done.finish_reason, done.text_offsets
        gained = Delta(done.text, done.token_ids, done.logprobs, reason, done.stop_reason, text_offsets=offsets)
        choice = self.piece(index, gained, done)
        return choice | ({"prompt_token_ids": done.prompt_token_ids} if self.ids else {})

    def piece(self, index: int, gained: Delta, done: Completion) -> dict:
        """Format the new output of a choice. done: the choice so far, with the prompt that an echo shows."""
        text, tokens, reason = gained.text, gained.token_ids, gained.finish_reason
        logprobs: Sequence[TokenLogprobs | None] = gained.logprobs or ()
        if self.scores_only:
            text, tokens, logprobs = "", [], ()
            reason = reason and "length"
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        if reason:
            choice["stop_reason"] = gained.stop_reason
        if self.ids:
            choice["token_ids"] = tokens
        echo, begun = None if self.echoes is None else self.echoes[index // self.n], self.begun.get(index)
        at = 0 if echo is None else len(echo.text)
        offsets = [at + offset for offset in gained.text_offsets or [0] * len(tokens)][: len(tokens)]
        if begun is None and echo is not None:  # the first piece
            choice["text"] = echo.text + text
            tokens, logprobs = done.prompt_token_ids + tokens, [*(done.prompt_logprobs or ()), *logprobs]
            offsets = self.offsets_in_echo(index // self.n, done.prompt_token_ids) + offsets
        elif begun is None:
            begun = self.top is not None and self.texts.have_text(done.prompt_token_ids)
        if self.top is not None:
            choice["logprobs"] = completion_logprobs(self.texts, tokens, logprobs, self.top, offsets, bool(begun))
            begun = begun or self.texts.have_text(tokens)
        self.begun[index] = bool(begun)
        return choice

    def offsets_in_echo(self, index: int, ids: list[int]) -> list[int]:
        """Return where each token of a prompt begins in its echo, if log-probabilities show it."""
        if self.top is None or self.echoes is None:
            return []
        if index not in self.located:
            self.located[index] = self.texts.prompt_offsets(ids, *self.echoes[index])
        return self.located[index]

    @property
    def is_plain(self) -> bool:
        """Return whether pieces show nothing but text and token ids."""
        return self.top is None and self.echoes is None and not self.scores_only

    def plain(self, index: int, gained: Delta) -> str:
        """Return the JSON of a piece, not the last, that shows nothing but text and token ids, as `piece` gives it."""
        ids = _ids(gained) if self.ids else ""
        return f'{{"index":{index},"text":{quoted(gained.text)},"logprobs":null,"finish_reason":null{ids}}}'

    def generated(self, tokens: int) -> int:
        """Return how many of the generated tokens count toward the usage."""
        return 0 if self.scores_only else tokens


@dataclass
class ChatForm:
    """Formats the choices of /v1/chat/completions, whole or in pieces; fields as in `CompletionForm`."""

    texts: TokenTexts
    top: int | None
    ids: bool
    n: int
    begun: dict[int, bool] = field(default_factory=dict)
    kind = "chat.completion"

    def whole_answer(self, done: Sequence[Completion]) -> dict:
        return {"prompt_token_ids": done[0].prompt_token_ids} if self.ids else {}

    def openings(self, count: int) -> list[dict]:
        role = {"role": "assistant", "content": ""}
        return [{"index": i, "delta": role, "logprobs": None, "finish_reason": None} for i in range(count)]

    def whole(self, index: int, done: Completion) -> dict:
        message = {"role": "assistant", "content": done.text, "refusal": None}
        return self._choice(index, "message", message, done, done)

    def piece(self, index: int, gained: Delta, done: Completion) -> dict:
        return self._choice(index, "delta", {"content": gained.text} if gained.text else {}, gained, done)

    def _choice(self, index: int, name: str, content: dict, gained: Delta | Completion, done: Completion) -> dict:
        choice = {"index": index, name: content, "logprobs": None, "finish_reason": gained.finish_reason}
        if gained.finish_reason:
            choice["stop_reason"] = gained.stop_reason
        if self.top is not None:
            begun = self.begun.get(index) or self.texts.have_text(done.prompt_token_ids)
            choice["logprobs"] = chat_logprobs(self.texts, gained.token_ids, gained.logprobs or [], self.top, begun)
            self.begun[index] = begun or self.texts.have_text(gained.token_ids)
        if self.ids:
            choice["token_ids"] = gained.token_ids
        return choice

    @property
    def is_plain(self) -> bool:
        return self.top is None

    def plain(self, index: int, gained: Delta) -> str:
        delta = f'{{"content":{quoted(gained.text)}}}' if gained.text else "{}"
        ids = _ids(gained) if self.ids else ""
        return f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":null{ids}}}'

    def generated(self, tokens: int) -> int:
        return tokens
