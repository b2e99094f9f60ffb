"""A model's quality as one report, as `minillm eval` prints and records it.  Lesson 05."""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .accuracy import accuracy
from .perplexity import perplexity
from .prompts import tokenizer_of
from .tasks import Task, workloads

if TYPE_CHECKING:
    from minillm.engine.llm import LLM


def quality(llm: "LLM", limit: int | None = None, measured: Sequence[Task] | None = None) -> Iterator[dict[str, Any]]:
    """Yield one result for each workload, in the form of a record's results, as soon as it is measured.

    limit     ask at most this many questions of each set, evenly spread; the text is always read in full
    measured  default: the embedded questions and text

    Raises ConfigError for a model without a tokenizer.
    """
    tokenizer_of(llm)
    for workload in workloads() if measured is None else measured:
        begin = time.perf_counter()
        if workload.questions is None:
            result = perplexity(llm)
        else:
            result = accuracy(llm, workload.questions, workload.examples, shots=workload.shots, limit=limit)
        seconds = time.perf_counter() - begin
        inputs = result.pop("input_tokens", result.get("tokens"))
        yield {
            "engine": "minillm",
            "workload": workload.name,
            "dtype": llm.engine.facts.dtype,
            "kv_cache_dtype": llm.engine.facts.kv_cache_dtype,
            "requests": result.get("questions"),
            "input_tokens": inputs,
            "output_tokens": 0,
            "seconds": round(seconds, 2),
            "output_tokens_per_s": 0.0,
            **{name: _rounded(value) for name, value in result.items()},
        }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 4) if isinstance(value, float) else value
