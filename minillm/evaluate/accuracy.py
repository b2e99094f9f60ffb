"""Multiple-choice accuracy by the log-likelihood of the answer's letter.  Lesson 05."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from minillm.errors import ConfigError
from minillm.request import MAX_LOGPROBS, SamplingParams

from .prompts import LETTERS, few_shot_prompt
from .sources import load_questions


def letter_tokens(tokenizer) -> list[int]:
    """The token that each letter is after "Answer:". ValueError if one is several tokens."""
    stem = tokenizer.encode("Answer:", add_special_tokens=False)
    found = []
    for letter in LETTERS:
        ids = tokenizer.encode(f"Answer: {letter}", add_special_tokens=False)
        if ids[: len(stem)] != stem or len(ids) != len(stem) + 1:
            raise ConfigError(f"this tokenizer does not write ' {letter}' after 'Answer:' as one token")
        found.append(ids[-1])
    return found


def letter_logprobs(llm, prompts: Sequence[str], progress: bool = False) -> list[list[float]]:
    """Log-probability of each letter as the prompt's next token, [prompts][letters].

    llm: anything with `tokenizer` and `generate(prompts, SamplingParams)`. One forward a prompt where all letters are
    among the likeliest tokens; a letter that is not is scored as the end of a longer prompt.
    """
    letters = letter_tokens(llm.tokenizer)
    ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
    first = llm.generate(ids, SamplingParams(max_tokens=1, temperature=0.0, logprobs=MAX_LOGPROBS), progress=progress)
    scores = [[done.logprobs[0].get(letter, -math.inf) for letter in letters] for done in first]
    rare = [(i, k) for i, row in enumerate(scores) for k, score in enumerate(row) if score == -math.inf]
    longer = [[*ids[i], letters[k]] for i, k in rare]
    scored = llm.generate(longer, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)) if longer else []
    for (i, k), done in zip(rare, scored, strict=True):
        scores[i][k] = done.prompt_logprobs[-1][letters[k]]
    return scores


def accuracy(
    llm,
    questions: Iterable[Mapping] | None = None,
    examples: Iterable[Mapping] | None = None,
    *,
    shots: int = 5,
    limit: int | None = None,
    progress: bool = False,
) -> dict:
    """Share of questions whose right letter is the likeliest after MMLU's few-shot prompt.

    questions  rows in MMLU's columns; default: the embedded held-out questions
    examples   rows that the shots are taken from, those of the question's subject; default: the embedded ones
    shots      answered examples before each question, fewer where the model's context has no room for them
    limit      at most this many questions, spread evenly over them

    Returns {"accuracy", "questions", "shots", "input_tokens", "subjects": {subject: accuracy}}.
    """
    rows = list(load_questions() if questions is None else questions)
    if limit is not None and limit < len(rows):
        rows = [rows[i * len(rows) // limit] for i in range(limit)]
    if not rows:
        raise ConfigError("there are no questions to ask")
    shown = defaultdict(list)
    for example in (load_questions(split="dev") if examples is None and questions is None else examples) or ():
        shown[example["subject"]].append(example)
    prompts = [_fitting(llm, row, shown[row["subject"]][:shots]) for row in rows]
    scores = letter_logprobs(llm, prompts, progress)
    right = defaultdict(list)
    for row, score in zip(rows, scores, strict=True):
        right[row["subject"]].append(max(range(len(LETTERS)), key=score.__getitem__) == row["answer"])
    return {
        "accuracy": sum(map(sum, right.values())) / len(rows),
        "questions": len(rows),
        "shots": shots,
        "input_tokens": sum(len(llm.tokenizer.encode(prompt)) for prompt in prompts),
        "subjects": {subject: sum(hits) / len(hits) for subject, hits in sorted(right.items())},
    }


def _fitting(llm, row: Mapping, examples: list[Mapping]) -> str:
    """The prompt with as many of the examples as fit; two tokens are kept for a letter and what follows it."""
    while True:
        prompt = few_shot_prompt(row, examples)
        if not examples or len(llm.tokenizer.encode(prompt)) + 2 <= llm.model_config.max_model_len:
            return prompt
        examples = examples[:-1]
