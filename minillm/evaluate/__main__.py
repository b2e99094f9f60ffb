"""Measure a model's quality: `python -m minillm.evaluate --write tiny-gemma-quality` writes the record.  Lesson 05."""

import argparse
import json
import time

from minillm import LLM
from minillm.bench import records
from minillm.evaluate import accuracy, load_questions, perplexity


def measure(llm: LLM, limit: int | None = None) -> list[dict]:
    """One result a workload: held-out questions with five shots and none, questions that training asks, perplexity."""
    held_out, asked, examples = load_questions(), load_questions(split="asked"), load_questions(split="dev")
    jobs = {
        "questions-held-out-5-shot": lambda: accuracy(llm, held_out, examples, limit=limit),
        "questions-held-out-0-shot": lambda: accuracy(llm, held_out, shots=0, limit=limit),
        "questions-asked-5-shot": lambda: accuracy(llm, asked, examples, limit=limit),
        "held-out-text": lambda: perplexity(llm),
    }
    results = []
    for workload, job in jobs.items():
        begin = time.perf_counter()
        found = job()
        seconds = time.perf_counter() - begin
        inputs = found.pop("input_tokens", found.get("tokens"))
        results.append(
            {
                "engine": "minillm",
                "workload": workload,
                "dtype": str(llm.engine.model.dtype).removeprefix("torch."),
                "requests": found.get("questions"),
                "input_tokens": inputs,
                "output_tokens": 0,
                "seconds": round(seconds, 2),
                "output_tokens_per_s": 0.0,
                **{name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()},
            }
        )
        print(json.dumps({key: results[-1].get(key) for key in ("workload", "accuracy", "perplexity", "seconds")}))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m minillm.evaluate", description=__doc__)
    parser.add_argument("--model", help="a directory; default: the embedded tiny-gemma")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--limit", type=int, help="at most this many questions of each set")
    parser.add_argument("--write", metavar="NAME", help="file of the record, or its name under data/results/<device>/")
    options = parser.parse_args()
    with LLM(options.model, device=options.device, dtype=options.dtype) as llm:
        content = records.record(measure(llm, options.limit), model=llm.engine.name)
    if options.write:
        print(records.write(content, options.write))


if __name__ == "__main__":
    main()
