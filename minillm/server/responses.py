"""Responses in OpenAI's format: completions, chat completions, their chunks and log-probabilities.  Lesson 99."""

import json
import re
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from json.encoder import encode_basestring as quoted

from minillm.request import Completion, Delta, TokenLogprobs
from minillm.tokenizer import Tokenizer, TokenizerError

LOWEST = -9999.0  # JSON has no -inf
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def dumps(content: dict) -> str:
    """Compact JSON."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def usage(prompts: Iterable[Completion], completion_tokens: int) -> dict:
    """OpenAI's usage. prompts: the first choice of each prompt."""
    prompt_tokens, cached = 0, 0
    for each in prompts:
        prompt_tokens += len(each.prompt_token_ids)
        cached += each.num_cached_tokens
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

    def chunk(self, choices: list[dict], **rest) -> dict:
        kind = "chat.completion.chunk" if self.kind == "chat.completion" else self.kind
        return self._wrap(kind, choices) | rest

    @cached_property
    def opening(self) -> str:
        """The JSON of a chunk up to its first choice."""
        return dumps(self.chunk([])).removesuffix("]}")

    def _wrap(self, kind: str, choices: list[dict]) -> dict:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class TokenTexts:
    """The string and bytes of each token id, as reported with log-probabilities; cached in `seen`."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer
        self.seen: dict[int, tuple[str, list[int] | None]] = {}

    def __call__(self, token: int) -> str:
        return self.entry_of(token)[0]

    def entry(self, token: int, logprob: float) -> dict:
        """An entry of a chat's log-probabilities. `bytes` is None if a token's bytes are unknown."""
        text, data = self.entry_of(token)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": data}

    def unknown(self, tokens: Iterable[int]) -> list[int]:
        """The tokens that are not cached and cannot be looked up, because there is no tokenizer."""
        return [token for token in set(tokens) if token not in self.seen] if self.tokenizer is None else []

    def entry_of(self, token: int) -> tuple[str, list[int] | None]:
        if token not in self.seen:
            self.seen[token] = self._read(token)
        return self.seen[token]

    def _read(self, token: int) -> tuple[str, list[int] | None]:
        if self.tokenizer is None:
            return f"token_id:{token}", None
        try:
            name = self.tokenizer.token(token)
        except TokenizerError:  # a padded vocabulary has ids without a token
            return f"token_id:{token}", None
        if byte := _BYTE.fullmatch(name):
            return f"bytes:\\x{byte[1].lower()}", [int(byte[1], 16)]
        text = self.tokenizer.decode([token], skip_special_tokens=False)
        return text, None if "\ufffd" in text else list(text.encode())


def completion_logprobs(
    texts: TokenTexts, tokens: list[int], logprobs: Sequence[TokenLogprobs | None], top: int, offset: int = 0
) -> dict:
    """The completions format: parallel lists with one item per token. `offset`: characters before the first token."""
    form: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, entry in zip(tokens, logprobs, strict=True):
        text = texts(token)
        form["tokens"].append(text)
        form["text_offset"].append(offset)
        form["token_logprobs"].append(None if entry is None else max(entry[token], LOWEST))
        form["top_logprobs"].append(None if entry is None else _likeliest_texts(texts, entry, token, top))
        offset += len(text)
    return form


def _likeliest_texts(texts: TokenTexts, entry: TokenLogprobs, token: int, top: int) -> dict[str, float]:
    ranked = _likeliest(entry, top)
    if token not in ranked:
        ranked[token] = entry[token]
    named: dict[str, float] = {}
    for each, logprob in ranked.items():
        named.setdefault(texts(each), max(logprob, LOWEST))  # if two ids have the same text, keep the likelier
    return named


def chat_logprobs(texts: TokenTexts, tokens: list[int], logprobs: list[TokenLogprobs], top: int) -> dict:
    """The chat format: a list of tokens, each with the likeliest tokens at its position."""
    content = []
    for token, entry in zip(tokens, logprobs, strict=True):
        rivals = [texts.entry(each, logprob) for each, logprob in _likeliest(entry, top).items()]
        content.append(texts.entry(token, entry[token]) | {"top_logprobs": rivals})
    return {"content": content, "refusal": None}


def _likeliest(entry: TokenLogprobs, top: int) -> dict[int, float]:
    return dict(sorted(entry.items(), key=lambda item: -item[1])[:top])


def _ids(gained: Delta) -> str:
    """The JSON of the token ids, as a choice's last member."""
    return f',"token_ids":[{",".join(map(str, gained.token_ids))}]'


@dataclass
class CompletionForm:
    """Formats the choices of /v1/completions, whole or in pieces. A whole choice is a single piece.

    top: how many of the likeliest tokens to report, None for no log-probabilities; ids: whether to report token ids;
    n: choices of each prompt; echoes: the prompts' texts, sent before the output, None for no echo; scores_only: omit
    everything generated.
    """

    texts: TokenTexts
    top: int | None
    ids: bool
    n: int
    echoes: list[str] | None = None
    scores_only: bool = False
    offsets: dict[int, int] = field(default_factory=dict)  # per choice that has started: characters sent so far
    kind = "text_completion"

    def openings(self, count: int) -> list[dict]:
        return []

    def whole_answer(self, done: Sequence[Completion]) -> dict:
        """What an answer has next to its choices."""
        return {}

    def whole(self, index: int, done: Completion) -> dict:
        gained = Delta(done.text, done.token_ids, done.logprobs, done.finish_reason, done.stop_reason)
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
        if self.echoes is not None and index not in self.offsets:
            choice["text"] = self.echoes[index // self.n] + text
            tokens, logprobs = done.prompt_token_ids + tokens, [*(done.prompt_logprobs or ()), *logprobs]
        offset = self.offsets.setdefault(index, 0)
        if self.top is not None:
            form = completion_logprobs(self.texts, tokens, logprobs, self.top, offset)
            self.offsets[index] += sum(map(len, form["tokens"]))
            choice["logprobs"] = form
        return choice

    @property
    def is_plain(self) -> bool:
        """Whether pieces show nothing but text and token ids."""
        return self.top is None and self.echoes is None and not self.scores_only

    def plain(self, index: int, gained: Delta) -> str:
        """The JSON of a piece that shows nothing but text and token ids and is not the last, as `piece` gives it."""
        ids = _ids(gained) if self.ids else ""
        return f'{{"index":{index},"text":{quoted(gained.text)},"logprobs":null,"finish_reason":null{ids}}}'

    def generated(self, tokens: int) -> int:
        """How many of the generated tokens count toward the usage."""
        return 0 if self.scores_only else tokens


@dataclass
class ChatForm:
    """Formats the choices of /v1/chat/completions, whole or in pieces; fields as in `CompletionForm`."""

    texts: TokenTexts
    top: int | None
    ids: bool
    n: int
    kind = "chat.completion"

    def whole_answer(self, done: Sequence[Completion]) -> dict:
        return {"prompt_token_ids": done[0].prompt_token_ids} if self.ids else {}

    def openings(self, count: int) -> list[dict]:
        role = {"role": "assistant", "content": ""}
        return [{"index": i, "delta": role, "logprobs": None, "finish_reason": None} for i in range(count)]

    def whole(self, index: int, done: Completion) -> dict:
        message = {"role": "assistant", "content": done.text, "refusal": None}
        return self._choice(index, "message", message, done)

    def piece(self, index: int, gained: Delta, done: Completion) -> dict:
        return self._choice(index, "delta", {"content": gained.text} if gained.text else {}, gained)

    def _choice(self, index: int, name: str, content: dict, gained: Delta | Completion) -> dict:
        choice = {"index": index, name: content, "logprobs": None, "finish_reason": gained.finish_reason}
        if gained.finish_reason:
            choice["stop_reason"] = gained.stop_reason
        if self.top is not None:
            choice["logprobs"] = chat_logprobs(self.texts, gained.token_ids, gained.logprobs or [], self.top)
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
