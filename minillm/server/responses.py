"""The answers' forms: OpenAI's completion, chat completion, their chunks and log-probabilities.  Lesson 99."""

import re
import time
import uuid
from dataclasses import dataclass, field

from minillm.request import Completion, TokenLogprobs

LOWEST = -9999.0  # JSON has no -inf
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def usage(prompt_tokens: int, completion_tokens: int) -> dict:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass
class Answer:
    """One response's envelope: the same id, time and model in the whole answer or in each of its chunks."""

    kind: str  # "text_completion" or "chat.completion"
    model: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'cmpl' if self.kind == 'text_completion' else 'chatcmpl'}-{uuid.uuid4().hex}"

    def whole(self, choices: list[dict], prompt_tokens: int, completion_tokens: int) -> dict:
        return self._wrap(self.kind, choices) | {"usage": usage(prompt_tokens, completion_tokens)}

    def chunk(self, choices: list[dict], **rest) -> dict:
        kind = "chat.completion.chunk" if self.kind == "chat.completion" else self.kind
        return self._wrap(kind, choices) | rest

    def _wrap(self, kind: str, choices: list[dict]) -> dict:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class TokenTexts:
    """Token ids as the strings and bytes that log-probabilities are reported with; remembers what it saw."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.seen: dict[int, tuple[str, list[int] | None]] = {}

    def __call__(self, token: int) -> str:
        return self._entry(token)[0]

    def entry(self, token: int, logprob: float) -> dict:
        """A chat log-probability. `bytes` is None where a lone token's bytes are not known."""
        text, data = self._entry(token)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": data}

    def _entry(self, token: int) -> tuple[str, list[int] | None]:
        if token not in self.seen:
            self.seen[token] = self._read(token)
        return self.seen[token]

    def _read(self, token: int) -> tuple[str, list[int] | None]:
        if self.tokenizer is None:
            return f"token_id:{token}", None
        if byte := _BYTE.fullmatch(self.tokenizer.token(token) or ""):
            return f"bytes:\\x{byte[1].lower()}", [int(byte[1], 16)]
        text = self.tokenizer.decode([token], skip_special_tokens=False)
        return text, None if "\ufffd" in text else list(text.encode())


def completion_logprobs(
    texts: TokenTexts, tokens: list[int], logprobs: list[TokenLogprobs | None], top: int, offset: int = 0
) -> dict:
    """The completions endpoint's form: parallel lists, a token each. `offset`: characters before the first."""
    form = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
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
        named.setdefault(texts(each), max(logprob, LOWEST))  # two ids may share a text: the likelier stays
    return named


def chat_logprobs(texts: TokenTexts, tokens: list[int], logprobs: list[TokenLogprobs], top: int) -> dict:
    """The chat endpoint's form: a list of tokens, each with its likeliest rivals."""
    content = []
    for token, entry in zip(tokens, logprobs, strict=True):
        rivals = [texts.entry(each, logprob) for each, logprob in _likeliest(entry, top).items()]
        content.append(texts.entry(token, entry[token]) | {"top_logprobs": rivals})
    return {"content": content, "refusal": None}


def _likeliest(entry: TokenLogprobs, top: int) -> dict[int, float]:
    return dict(sorted(entry.items(), key=lambda item: -item[1])[:top])


def completion_choice(
    index: int,
    done: Completion,
    texts: TokenTexts,
    *,
    top: int | None,
    echo: str | None,
    scores_only: bool,
    ids: bool,
) -> dict:
    """A finished choice of /v1/completions. echo: the prompt's text, put first; scores_only: nothing after it."""
    tokens, logprobs = ([], []) if scores_only else (done.token_ids, done.logprobs or [])
    if echo is not None and top is not None:
        tokens, logprobs = done.prompt_token_ids + tokens, (done.prompt_logprobs or []) + logprobs
    choice = {
        "index": index,
        "text": (echo or "") + ("" if scores_only else done.text),
        "logprobs": None if top is None else completion_logprobs(texts, tokens, logprobs, top),
        "finish_reason": "length" if scores_only else done.finish_reason,
    }
    if ids:
        choice |= {
            "token_ids": [] if scores_only else done.token_ids,
            "prompt_token_ids": done.prompt_token_ids,
        }
    return choice


def chat_choice(index: int, done: Completion, texts: TokenTexts, *, top: int | None, ids: bool) -> dict:
    """A finished choice of /v1/chat/completions."""
    choice = {
        "index": index,
        "message": {"role": "assistant", "content": done.text, "refusal": None},
        "logprobs": None if top is None else chat_logprobs(texts, done.token_ids, done.logprobs or [], top),
        "finish_reason": done.finish_reason,
    }
    return choice | ({"token_ids": done.token_ids} if ids else {})
