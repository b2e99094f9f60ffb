"""A model's quality as one report, which `minillm eval` prints and records.  Lesson 05."""

import time
from collections.abc import Iterator

from minillm.errors import ConfigError

from .accuracy import accuracy
from .perplexity import perplexity
from .sources import load_questions


def quality(llm, limit: int | None = None) -> Iterator[dict]:
    """One result a workload, in the form of a record, as each is measured.

    Held-out questions with five examples and with none, questions that training asks, and the held-out text.
    limit: at most this many questions of each set, spread evenly over it; the text is always read whole.
    Raises ConfigError for a model without a tokenizer.
    """
    if llm.tokenizer is None:
        raise ConfigError("this model has no tokenizer to read questions with: name a directory with tokenizer.json")
    held_out, asked, examples = load_questions(), load_questions(split="asked"), load_questions(split="dev")
    jobs = {
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


def _rounded(value):
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 4) if isinstance(value, float) else value
