"""Multiple-choice accuracy by the log-likelihood of the answer's letter.  Lesson 05."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minillm.errors import ConfigError
from minillm.request import Completion, SamplingParams
from minillm.request_values import MAX_LOGPROBS
from minillm.tokenizer import Tokenizer

from .perplexity import prompt_logprob
from .prompts import LETTERS, few_shot_prompt, tokenizer_of
from .sources import load_questions

if TYPE_CHECKING:
    from minillm.engine.llm import LLM


def letter_tokens(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the ids of each letter's tokens after "Answer:": one each, or more if the vocabulary is small.

    Raises ConfigError if a letter changes the tokens before it.
    """
    stem = tokenizer.encode("Answer:", add_special_tokens=False)
    found = []
    for letter in LETTERS:
        ids = tokenizer.encode(f"Answer: {letter}", add_special_tokens=False)
        if ids[: len(stem)] != stem or len(ids) == len(stem):
            raise ConfigError(f"this tokenizer encodes 'Answer:' in another way if ' {letter}' follows")
        found.append(ids[len(stem) :])
    return found


@dataclass(frozen=True)
class NextToken:
    """A model's prediction of the token after a prompt."""

    likeliest: int  # the most likely token
    logprobs: list[float]  # of the tokens that were asked about


def next_tokens(
    llm: "LLM", prompts: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], progress: bool = False
) -> list[NextToken]:
    """Return the log-probabilities of some tokens, each prompt's own, as its next token.

    A prompt takes one forward pass if all its tokens are among its MAX_LOGPROBS most likely ones. Each that is not
    takes one more, as the last token of a longer prompt.
    """
    ids = [list(prompt) for prompt in prompts]
    first = llm.generate(ids, SamplingParams(max_tokens=1, temperature=0.0, logprobs=MAX_LOGPROBS), progress=progress)
    likely = [done.logprobs[0] if done.logprobs else {} for done in first]
    scores = [[found.get(token, -math.inf) for token in tokens] for found, tokens in zip(likely, wanted, strict=True)]
    rare = [(i, k) for i, row in enumerate(scores) for k, score in enumerate(row) if score == -math.inf]
    longer = [[*ids[i], wanted[i][k]] for i, k in rare]
    scored = llm.generate(longer, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)) if longer else []
    for (i, k), done in zip(rare, scored, strict=True):
        scores[i][k] = prompt_logprob(done, -1, wanted[i][k])
    return [NextToken(max(found, key=found.__getitem__), row) for found, row in zip(likely, scores, strict=True)]


def letter_logprobs(llm: "LLM", prompts: Sequence[str], progress: bool = False) -> list[list[float]]:
    """Return the log-probability of each letter after a prompt: [prompts][letters].

    A letter of several tokens has the sum of theirs. llm: an `LLM`, or any object with its `tokenizer` and `generate`.
    Raises ConfigError if a letter changes the tokens before it.
    """
    tokenizer = tokenizer_of(llm)
    letters = letter_tokens(tokenizer)
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    if all(len(letter) == 1 for letter in letters):
        wanted = [[letter[0] for letter in letters]] * len(ids)
        return [found.logprobs for found in next_tokens(llm, ids, wanted, progress)]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    done = iter(llm.generate([[*each, *letter] for each in ids for letter in letters], params, progress=progress))
    return [[_ending_logprob(next(done), letter) for letter in letters] for _ in ids]


def _ending_logprob(completion: Completion, tokens: Sequence[int]) -> float:
    """Return the log-probability of a prompt's last tokens, given those before them."""
    return sum(prompt_logprob(completion, at, tokens[at]) for at in range(-len(tokens), 0))


@dataclass(frozen=True)
class Answers:
    """A model's score on each question."""

    subjects: list[str]  # of each question
    correct: list[bool]
    shots: int
    input_tokens: int

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / len(self.correct)

    def by_subject(self) -> dict[str, float]:
        right: defaultdict[str, list[bool]] = defaultdict(list)
        for subject, correct in zip(self.subjects, self.correct, strict=True):
            right[subject].append(correct)
        return {subject: sum(hits) / len(hits) for subject, hits in sorted(right.items())}


def answers(
    llm: "LLM",
    questions: Iterable[Mapping[str, Any]] | None = None,
    examples: Iterable[Mapping[str, Any]] | None = None,
    *,
    shots: int = 5,
    limit: int | None = None,
    progress: bool = False,
) -> Answers:
    """Ask questions as `accuracy` does, and keep each answer. Raises as it does."""
    rows = list(load_questions() if questions is None else questions)
    if limit is not None and limit < len(rows):
        rows = [rows[i * len(rows) // limit] for i in range(limit)]
    if not rows:
        raise ConfigError("there are no questions to ask")
    shown: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for example in (load_questions(split="dev") if examples is None and questions is None else examples) or ():
        shown[example["subject"]].append(example)
    tokenizer, context = tokenizer_of(llm), llm.engine.max_model_len
    longest = context - 1 - max(map(len, letter_tokens(tokenizer)))  # a letter and one more token follow
    prompts = [_fitting(tokenizer, longest, row, shown[row["subject"]][:shots]) for row in rows]
    scores = letter_logprobs(llm, prompts, progress)
    chosen = [max(range(len(LETTERS)), key=score.__getitem__) for score in scores]
    return Answers(
        subjects=[row["subject"] for row in rows],
        correct=[letter == row["answer"] for letter, row in zip(chosen, rows, strict=True)],
        shots=shots,
        input_tokens=sum(len(tokenizer.encode(prompt)) for prompt in prompts),
    )


def accuracy(
    llm: "LLM",
    questions: Iterable[Mapping[str, Any]] | None = None,
    examples: Iterable[Mapping[str, Any]] | None = None,
    *,
    shots: int = 5,
    limit: int | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Return the share of questions whose right letter is the most likely one after MMLU's few-shot prompt.  Lesson 05.

    questions  rows with MMLU's columns; default: the embedded held-out questions
    examples   rows to take the shots from, those of the question's subject; default: the embedded ones
    shots      answered examples before each question; fewer if the model's context has no room for them
    limit      ask at most this many of the questions, evenly spread
    progress   show a progress bar

    Returns {"accuracy", "questions", "shots", "input_tokens", "subjects": {subject: accuracy}}.
    Raises ConfigError without questions or a tokenizer, or if a letter changes the tokens before it.
    """
    found = answers(llm, questions, examples, shots=shots, limit=limit, progress=progress)
    return {
        "accuracy": found.accuracy,
        "questions": len(found.correct),
        "shots": shots,
        "input_tokens": found.input_tokens,
        "subjects": found.by_subject(),
    }


def _fitting(tokenizer: Tokenizer, longest: int, row: Mapping[str, Any], examples: Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt of a question with as many examples as fit into `longest` tokens."""
    while True:
        prompt = few_shot_prompt(row, examples)
        if not examples or len(tokenizer.encode(prompt)) <= longest:
            return prompt
        examples = examples[:-1]
