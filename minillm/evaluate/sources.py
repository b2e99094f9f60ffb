"""Questions, texts and traces: the embedded ones, or those of the Hugging Face hub.  Lesson 05.

Everything is read with `datasets`, which is imported only when something is loaded.
"""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from minillm.errors import ConfigError, MissingPackage, Unreachable
from minillm.folders import DATA, how_to_install

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = ["question", "subject", "choices", "answer"]


def _datasets() -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        how = how_to_install("minillm[compare]")
        raise MissingPackage(f"questions and traces are read with `datasets`, which is not installed: {how}") from error
    datasets.disable_progress_bars()
    return datasets


def load_questions(
    source: str | Path | None = None, split: str = "test", subjects: Sequence[str] | None = None
) -> "Dataset":
    """Return a `datasets.Dataset` with MMLU's columns: question, subject, choices (four), answer (0 to 3).  Lesson 05.

    source    None: the embedded questions about the Tallow Isles (splits dev, asked and test); "cais/mmlu", or a
              folder in its layout (a configuration for each subject, and "all"; splits dev, validation and test)
    subjects  only these; default: all
    Raises ConfigError for an unknown split or subject, Unreachable if the hub cannot be reached.
    """
    datasets = _datasets()
    if source is None:
        files = {path.stem: str(path) for path in sorted((DATA / "questions").glob("*.jsonl"))}
        if split not in files:
            raise ConfigError(f"no split {split!r} among the embedded questions; there are {', '.join(files)}")
        questions = datasets.load_dataset("json", data_files={split: files[split]}, split=split)
    else:
        try:
            parts = [datasets.load_dataset(str(source), name, split=split) for name in subjects or ["all"]]
        except (ConnectionError, FileNotFoundError) as error:
            raise Unreachable(
                f"{source} could not be loaded ({error}): go online once, name a folder in its layout, or leave "
                "`source` out for the embedded questions"
            ) from error
        except ValueError as error:  # a split or a subject that it does not have
            raise ConfigError(f"{source}: {error}") from error
        questions = datasets.concatenate_datasets(parts)
    if subjects is not None:
        known = set(questions.unique("subject"))
        if missing := [subject for subject in subjects if subject not in known]:
            raise ConfigError(f"no subject {', '.join(missing)}; there are {', '.join(sorted(known))}")
        questions = questions.filter(lambda row: row["subject"] in subjects)
    return questions.select_columns(COLUMNS)


def load_text(path: str | Path | None = None) -> str:
    """Return a text to measure perplexity on; default: prose and stories of the Tallow Isles that training never
    saw.
    """
    rows = _datasets().load_dataset(
        "text", data_files=str(path or DATA / "text" / "held_out.txt"), split="train", sample_by="document"
    )
    return rows[0]["text"]


def load_trace(path: str | Path | None = None) -> "Dataset":
    """Return a `datasets.Dataset` of requests, in order of arrival; default: the embedded trace.  Lesson 10.

    Columns: arrival (seconds after the trace began), input_tokens (the shared prefix included), output_tokens,
    prefix_id (None: no shared prefix) and prefix_tokens.
    """
    file = str(path or DATA / "traces" / "conversation.jsonl")
    return _datasets().load_dataset("json", data_files=file, split="train")
