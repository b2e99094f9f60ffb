"""MMLU's prompt: how a multiple-choice question is asked.  Lesson 05.

Hendrycks et al., "Measuring Massive Multitask Language Understanding" (2021), figure 1 and section 4.1.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from minillm.errors import ConfigError
from minillm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minillm.engine.llm import LLM

LETTERS = "ABCD"


def tokenizer_of(llm: "LLM") -> Tokenizer:
    """Return the model's tokenizer. Raises ConfigError if it has none."""
    if llm.tokenizer is None:
        raise ConfigError(
            "this model has no tokenizer to encode texts and questions with: name a directory with tokenizer.json"
        )
    return llm.tokenizer


def header(subject: str) -> str:
    """Return the first line: what the questions are about."""
    return f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"


def question_block(row: Mapping[str, Any], answered: bool) -> str:
    """Return a question, its options by letter, and "Answer:", with the letter if `answered`.

    row: MMLU's columns question, choices (four) and answer (0 to 3). Raises ConfigError for another number of choices.
    """
    choices = list(row["choices"])
    if len(choices) != len(LETTERS):
        raise ConfigError(f"a question has {len(LETTERS)} choices, but {row['question']!r} has {len(choices)}")
    options = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
    return f"{row['question']}\n{options}\nAnswer:" + (f" {LETTERS[row['answer']]}" if answered else "")


def few_shot_prompt(row: Mapping[str, Any], examples: Iterable[Mapping[str, Any]] = ()) -> str:
    """Return the header, the answered examples, and the question without its answer."""
    blocks = [question_block(example, answered=True) for example in examples]
    return header(row["subject"]) + "\n\n".join([*blocks, question_block(row, answered=False)])
