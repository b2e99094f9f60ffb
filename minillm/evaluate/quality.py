"""A model's quality as one report, as `minillm eval` prints and records it.  Lesson 05."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .accuracy import accuracy
from .perplexity import perplexity
from .prompts import tokenizer_of
from .sources import load_questions

if TYPE_CHECKING:
    from minillm.engine.llm import LLM


def quality(llm: "LLM", limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield one result for each workload, in the form of a record's results, as soon as it is measured.

    Workloads: held-out questions with five examples and with none, questions that training asked, the held-out text.
    limit: ask at most this many questions of each set, evenly spread; the text is always read in full.
    Raises ConfigError for a model without a tokenizer.
    """
    tokenizer_of(llm)
    held_out, asked, examples = load_questions(), load_questions(split="asked"), load_questions(split="dev")
    jobs: dict[str, Callable[[], dict[str, Any]]] = {
        "questions-held-out-5-shot": lambda: accuracy(llm, held_out, examples, limit=limit),
        "questions-held-out-0-shot": lambda: accuracy(llm, held_out, shots=0, limit=limit),
        "questions-asked-5-shot": lambda: accuracy(llm, asked, examples, limit=limit),
        "held-out-text": lambda: perplexity(llm),
    }
    for workload, job in jobs.items():
        begin = time.perf_counter()
        found = job()
        seconds = time.perf_counter() - begin
        inputs = found.pop("input_tokens", found.get("tokens"))
        yield {
            "engine": "minillm",
            "workload": workload,
            "dtype": str(llm.engine.model.dtype).removeprefix("torch."),
            "requests": found.get("questions"),
            "input_tokens": inputs,
            "output_tokens": 0,
            "seconds": round(seconds, 2),
            "output_tokens_per_s": 0.0,
            **{name: _rounded(value) for name, value in found.items()},
        }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 4) if isinstance(value, float) else value
