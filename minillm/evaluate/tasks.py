"""The tasks of `minillm eval --tasks`, by name.  Lesson 05.

isles         the embedded questions about the Tallow Isles, which have MMLU's form: held-out ones with five examples
              and with none, and ones that training asked
text          perplexity of the embedded held-out text
mmlu          MMLU's 14,042 test questions with five examples, downloaded from the hub once
mmlu_SUBJECT  those of one subject: mmlu_abstract_algebra
DIRECTORY     questions in MMLU's layout on disk
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.errors import ConfigError, Unreachable
from minillm.values import shown

from .sources import load_questions

MMLU = "cais/mmlu"
DEFAULT = ("isles", "text")
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Task:
    """Questions and how many examples each is asked with; without questions, the held-out text."""

    name: str
    questions: Rows | None = None
    examples: Rows = ()
    shots: int = 0


def workloads(tasks: Sequence[str] = DEFAULT) -> list[Task]:
    """Return the workloads of these tasks, loaded. Raises ConfigError for an unknown one; Unreachable, offline."""
    loaded = []
    for task in tasks:
        if task == "text":
            loaded.append(Task("held-out-text"))
        elif task == "isles":
            held_out, asked, examples = load_questions(), load_questions(split="asked"), load_questions(split="dev")
            loaded.append(Task("questions-held-out-5-shot", held_out, examples, 5))
            loaded.append(Task("questions-held-out-0-shot", held_out))
            loaded.append(Task("questions-asked-5-shot", asked, examples, 5))
        else:
            loaded.append(_of_mmlu(task))
    return loaded


def held_out(task: str) -> Task:
    """Return the one workload that compares models on a task's questions. Raises as `workloads` does."""
    if task == "text":
        raise ConfigError("a comparison reads the text in any case: give a task that has questions, isles or mmlu")
    return Task("questions-held-out-0-shot", load_questions()) if task == "isles" else _of_mmlu(task)


def mmlu_is_here() -> bool:
    """Return whether `datasets` has MMLU on this machine, so that nothing has to be downloaded."""
    from datasets import config

    return (Path(config.HF_DATASETS_CACHE) / MMLU.replace("/", "___") / "all").is_dir()


def _of_mmlu(task: str) -> Task:
    name, _, subject = task.partition("_")
    folder = Path(task).expanduser()
    if name != "mmlu" and not folder.is_dir():
        raise ConfigError(
            f"no task {shown(task)}; tasks are isles, text, mmlu, mmlu_SUBJECT, or a directory in MMLU's layout"
        )
    source, subjects = (MMLU, [subject] if subject else None) if name == "mmlu" else (str(folder), None)
    try:
        questions, examples = (load_questions(source, split, subjects) for split in ("test", "dev"))
    except Unreachable as error:
        raise Unreachable(f"{error}. The embedded twin of MMLU needs no network: --tasks isles") from error
    return Task(f"{task if name == 'mmlu' else folder.name}-5-shot", questions, examples, 5)
