"""Perplexity far beyond the context: attention sinks, and the alternatives to them.  Lesson 09.

Xiao et al. 2023, "StreamingLLM", sections 3.1 and 4.1. A model that reads past its context can recompute the newest
tokens for each token (exact, and slow), cache only the newest tokens (some models then fail), cache the first tokens
too (the attention sinks), or cache all tokens (at positions that training never saw).
"""

import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from minillm.errors import ConfigError
from minillm.model.loader import resolve
from minillm.request import SamplingParams

from .perplexity import prompt_logprob
from .prompts import tokenizer_of
from .sources import load_text


def streaming(
    model: str | Path | None = None,
    *,
    attention_sinks: int = 4,
    attention_window: int = 1024,
    times: int = 4,
    every: int = 16,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Yield one result for each method, in the form of a record's results, on `times` contexts of the embedded text.

    Methods: "recomputed" (the newest `attention_window` tokens, recomputed for each token), "sinks", "no-sinks" and
    "dense" (all tokens cached). Each scores the same tokens: every `every`-th beyond the context. `beside_recomputed`
    is a method's perplexity divided by that of "recomputed". options: of the engine. model: a directory, or None for
    the embedded model. Raises ConfigError for a window that does not fit the context, or without a tokenizer.
    """
    from minillm.engine.llm import LLM

    options = {"max_num_seqs": 16, "enable_prefix_caching": False, **options}
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    base: float | None = None
    with LLM(model, **options) as llm:
        facts = llm.engine.facts
        context, dtype, kept = facts.max_model_len, facts.dtype, facts.kv_cache_dtype
        if attention_window >= context:
            raise ConfigError(f"a window of {attention_window} tokens does not fit the context of {context}")
        tokenizer = tokenizer_of(llm)
        text = tokenizer.encode(load_text(), add_special_tokens=False)
        ids = [*tokenizer.prefix, *text * -(-times * context // len(text))][: times * context]
        scored = range(context, len(ids), every)
    window = {"attention_window": attention_window}
    ways: dict[str, dict[str, int]] = {
        "recomputed": {},
        "sinks": {"attention_sinks": attention_sinks, **window},
        "no-sinks": {"attention_sinks": 0, **window},
        "dense": {"max_model_len": len(ids) + 1},
    }
    for name, more in ways.items():
        prompts = [ids]
        if name == "recomputed":
            prompts = [ids[at - attention_window : at + 1] for at in scored]
        with _longer(model, len(ids) + 1) if name == "dense" else nullcontext(model) as source:
            begin = time.perf_counter()
            with LLM(source, **options | more) as llm:
                done = llm.generate(prompts, params)
                stream = llm.engine.facts.stream
            seconds = time.perf_counter() - begin
        if name == "recomputed":
            scores = [prompt_logprob(each, -1, ids[at]) for each, at in zip(done, scored, strict=True)]
        else:
            scores = [prompt_logprob(done[0], at, ids[at]) for at in scored]
        perplexity = math.exp(-sum(scores) / len(scores))
        base = base or perplexity
        yield {
            "engine": "minillm",
            "workload": f"streaming-{name}",
            "dtype": dtype,
            "kv_cache_dtype": kept,
            "requests": len(prompts),
            "input_tokens": sum(map(len, prompts)),
            "output_tokens": 0,
            "seconds": round(seconds, 2),
            "output_tokens_per_s": 0.0,
            "perplexity": round(perplexity, 4),
            "beside_recomputed": round(perplexity / base, 4),
            "tokens": len(scores),
            "context": context,
            "length": len(ids),
            "blocks_of_a_row": stream and stream.max_blocks,
            **more,
        }


def _longer(model: str | Path | None, length: int) -> tempfile.TemporaryDirectory[str]:
    """Return a copy of the model's directory that claims a context of `length` tokens."""
    copy = tempfile.TemporaryDirectory(prefix="minillm-")
    shutil.copytree(resolve(model), copy.name, dirs_exist_ok=True)
    path = Path(copy.name) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"max_position_embeddings": length}), encoding="utf-8")
    return copy
