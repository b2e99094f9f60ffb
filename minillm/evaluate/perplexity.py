"""Perplexity of a text with a sliding window.  Lesson 05.

perplexity = exp(-1/N sum log p(token | the tokens before it)).  A model sees at most its context, so the text is cut
into windows that overlap: each token is scored once, in the first window that holds it, with the overlap before it.

Each window begins as `tokenizer.encode` begins a text: after <bos> if the tokenizer adds it, and otherwise with the
text itself, even if the tokenizer has a <bos>. Some tokenizers name a token there that only opens the turns of a chat.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from minillm.errors import ConfigError
from minillm.request import Completion, SamplingParams

from .prompts import tokenizer_of
from .sources import load_text

if TYPE_CHECKING:
    from minillm.engine.llm import LLM


def windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, first scored, stop) of each window over `length` tokens; together they score each token once."""
    if not 0 < stride <= window:
        raise ConfigError(f"stride must be from 1 to the window's {window} tokens, not {stride}")
    scored = 0
    while scored < length:
        stop = min(length, window if scored == 0 else scored + stride)
        yield max(0, stop - window), scored, stop
        scored = stop


def prompt_logprob(completion: Completion, position: int, token: int) -> float:
    """Return the log-probability of a prompt's token at `position`, given the tokens before it.

    Raises ValueError for the first position, or if the request had no `prompt_logprobs` or was aborted.
    """
    logprobs = completion.prompt_logprobs
    if logprobs is None or (entry := logprobs[position]) is None:
        why = f": {completion.stop_reason}" if completion.finish_reason == "abort" else ""
        raise ValueError(f"the completion has no log-probabilities for position {position} of its prompt{why}")
    return entry[token]


def perplexity(
    llm: "LLM",
    text: str | Sequence[int] | None = None,
    *,
    window: int | None = None,
    stride: int | None = None,
    prefix: Sequence[int] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Perplexity of a text or of token ids (default: the embedded held-out text) under the model.  Lesson 05.

    window    tokens of the text that the model sees at once; default: 1,024, or as many as its context holds
    stride    tokens that the window moves by; default: half the window. A smaller stride is slower and gives a
              slightly lower perplexity
    prefix    token ids before each window, which are not scored; default: those that `tokenizer.encode` puts before a
              text. lm-evaluation-harness always puts the tokenizer's bos_token there: [tokenizer.bos_token_id]
    progress  show a progress bar

    Without a prefix, the first token of the text has nothing before it, and is not scored. Returns {"perplexity",
    "nats_per_token", "tokens" (scored), "bits_per_byte" (None for ids), "window", "stride", "prefix"}.
    Raises ConfigError for a window that does not fit the context, or a text too short to score.
    """
    if text is None:
        text = load_text()
    usual = [] if llm.tokenizer is None else llm.tokenizer.prefix
    ids = tokenizer_of(llm).encode(text)[len(usual) :] if isinstance(text, str) else list(text)
    start = list(usual if prefix is None else prefix)
    longest = llm.engine.max_model_len - len(start) - 1
    window = min(1024, longest) if window is None else window
    if not 1 < window <= longest:
        raise ConfigError(f"the window must be from 2 to {longest} tokens for this model's context, not {window}")
    stride = max(1, window // 2) if stride is None else stride
    spans = list(windows(len(ids), window, stride))
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    done = llm.generate([start + ids[begin:stop] for begin, _, stop in spans], params, progress=progress)
    total, count = 0.0, 0
    for (begin, scored, stop), completion in zip(spans, done, strict=True):
        for position in range(scored, stop):
            at = position - begin + len(start)
            if at > 0:  # without a prefix, the text's first token has nothing before it to be predicted from
                total -= prompt_logprob(completion, at, ids[position])
                count += 1
    if count == 0:
        raise ConfigError("the text is too short: nothing is left to score")
    return {
        "perplexity": math.exp(total / count),
        "nats_per_token": total / count,
        "tokens": count,
        "bits_per_byte": total / math.log(2) / len(text.encode()) if isinstance(text, str) else None,
        "window": window,
        "stride": stride,
        "prefix": start,
    }
