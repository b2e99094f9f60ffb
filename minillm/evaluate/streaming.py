"""Perplexity far beyond the context: streams beside what they stand for.  Lesson 09.

Xiao et al. 2023, "StreamingLLM", sections 3.1 and 4.1: a model that reads past its context may compute the newest
tokens afresh for every token (right, and slow), keep only the newest (which some models cannot bear), keep the first
ones too (the sinks), or keep all (positions that training never saw).
"""

import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from minillm.errors import ConfigError
from minillm.model.loader import resolve
from minillm.request import SamplingParams

from .sources import load_text


def streaming(
    model: str | Path | None = None,
    *,
    attention_sinks: int = 4,
    attention_window: int = 1024,
    times: int = 4,
    every: int = 16,
    **options,
) -> Iterator[dict]:
    """One result a way of reading, in the form of a record, on the embedded text, `times` the model's context long.

    Ways: "recomputed" (the newest `attention_window` tokens, afresh for each token), "sinks", "no-sinks" and "dense"
    (all tokens before). Scored by all: every `every`-th token beyond the context. `beside_recomputed` is the
    perplexity divided by the first one's. options: of the engine. Needs the model's own directory.
    """
    from minillm import LLM  # imports upwards: only when it runs

    options = {"max_num_seqs": 16, "enable_prefix_caching": False, **options}
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    base = None
    with LLM(model, **options) as llm:
        context, dtype = llm.engine.max_model_len, str(llm.engine.model.dtype).removeprefix("torch.")
        if attention_window >= context:
            raise ConfigError(f"a window of {attention_window} tokens does not fit the context of {context}")
        text = llm.tokenizer.encode(load_text(), add_special_tokens=False)
        ids = [llm.tokenizer.bos_token_id, *text * -(-times * context // len(text))][: times * context]
        scored = range(context, len(ids), every)
    stream = {"attention_window": attention_window}
    ways = {
        "recomputed": {},
        "sinks": {"attention_sinks": attention_sinks, **stream},
        "no-sinks": {"attention_sinks": 0, **stream},
        "dense": {"max_model_len": len(ids) + 1},
    }
    for name, more in ways.items():
        prompts = [ids]
        if name == "recomputed":
            prompts = [ids[at - attention_window : at + 1] for at in scored]
        with _longer(model, len(ids) + 1) if name == "dense" else nullcontext(model) as place:
            begin = time.perf_counter()
            with LLM(place, **options | more) as llm:
                done = llm.generate(prompts, params)
                stream = llm.engine.executor.facts.stream
            seconds = time.perf_counter() - begin
        if name == "recomputed":
            found = [each.prompt_logprobs[-1][ids[at]] for each, at in zip(done, scored, strict=True)]
        else:
            found = [done[0].prompt_logprobs[at][ids[at]] for at in scored]
        perplexity = math.exp(-sum(found) / len(found))
        base = base or perplexity
        yield {
            "engine": "minillm",
            "workload": f"streaming-{name}",
            "dtype": dtype,
            "requests": len(prompts),
            "input_tokens": sum(map(len, prompts)),
            "output_tokens": 0,
            "seconds": round(seconds, 2),
            "output_tokens_per_s": 0.0,
            "perplexity": round(perplexity, 4),
            "beside_recomputed": round(perplexity / base, 4),
            "tokens": len(found),
            "context": context,
            "length": len(ids),
            "blocks_of_a_row": stream and stream.room,
            **more,
        }


def _longer(model: str | Path | None, length: int) -> tempfile.TemporaryDirectory:
    """A copy of the model's directory that claims a context of `length` tokens."""
    copy = tempfile.TemporaryDirectory(prefix="minillm-")
    shutil.copytree(resolve(model), copy.name, dirs_exist_ok=True)
    path = Path(copy.name) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"max_position_embeddings": length}), encoding="utf-8")
    return copy
