"""A style to train: questions that tiny-gemma can answer, its own answers, and words around them.  Lesson 15."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minillm.engine.llm import LLM
from minillm.folders import DATA
from minillm.request import SamplingParams

QUESTIONS = DATA / "questions" / "asked.jsonl"
TRAINED, HELD_OUT = 72, 24  # questions
END = "<end_of_turn>"
ANSWER = SamplingParams(max_tokens=40, temperature=0)
NOT_TRAINED = -100  # the label of tokens that cross_entropy leaves out
Pair = tuple[list[int], list[int]]  # the tokens before an answer, and those of the answer


def questions(seed: int = 0) -> tuple[list[str], list[str]]:
    """Questions to train with, and others to ask afterwards."""
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    chosen = random.Random(seed).sample(lines, TRAINED + HELD_OUT)
    every = [json.loads(line)["question"] for line in chosen]
    return every[:TRAINED], every[TRAINED:]


def conversation(question: str) -> list[dict[str, str]]:
    """A question as `LLM.chat` takes it."""
    return [{"role": "user", "content": question}]


@dataclass
class Style:
    """Conversations in which each answer of the model stands between an opening and a closing.

    The model answers the questions itself, so no other text is needed, and facts stay as they are.
    """

    llm: LLM
    opening: str
    closing: str
    seed: int = 0
    pairs: list[Pair] = field(init=False)  # to train with
    held_out: list[Pair] = field(init=False)  # to measure with
    asked: list[str] = field(init=False)  # the questions of `held_out`

    def __post_init__(self) -> None:
        trained, self.asked = questions(self.seed)
        done = self.llm.chat([conversation(each) for each in trained + self.asked], ANSWER)
        every = [self._pair(done_one.prompt_token_ids, done_one.text.strip()) for done_one in done]
        self.pairs, self.held_out = every[:TRAINED], every[TRAINED:]

    def _pair(self, before: Sequence[int], answer: str) -> Pair:
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None
        text = f"{self.opening} {answer} {self.closing}{END}\n"
        return list(before), tokenizer.encode(text, add_special_tokens=False)

    def count(self, adapter: str | None) -> tuple[int, int]:
        """Return how many answers to held-out questions begin with the opening, and how many of these end right."""
        answers = self.answers(adapter)
        begun = [each for each in answers if each.startswith(self.opening)]
        return len(begun), sum(each.endswith(self.closing) for each in begun)

    def answers(self, adapter: str | None) -> list[str]:
        """The answers to the held-out questions, with an adapter that the engine has loaded."""
        done = self.llm.chat([conversation(each) for each in self.asked], ANSWER, adapter=adapter)
        return [each.text.strip() for each in done]


def batch(pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """Token ids [rows, longest], and the labels of the answers' tokens, like them."""
    longest = max(len(before) + len(answer) for before, answer in pairs)
    ids = torch.zeros(len(pairs), longest, dtype=torch.int64)
    labels = torch.full_like(ids, NOT_TRAINED)
    for row, (before, answer) in enumerate(pairs):
        end = len(before) + len(answer)
        ids[row, :end] = torch.tensor(before + answer)
        labels[row, len(before) : end] = torch.tensor(answer)
    return ids, labels
