"""The record of `minillm bench ablation`, with its settings named in the lesson's words.  Lesson 11."""

from typing import Any

from minillm.bench import records

NAMES = {"a kernel an operation": "a kernel per operation", "five launches a layer": "five launches per layer"}


def read(record: str) -> dict[str, Any]:
    """A committed record of `minillm bench ablation`. Raises ConfigError when there is none of this name."""
    found = records.read(record)
    rows = [row | {"name": NAMES.get(row["name"], row["name"])} for row in found["results"]]
    return found | {"results": rows}
