"""Faults in accuracy and perplexity."""

from . import Fault

ACCURACY, PERPLEXITY, TESTS = (
    "minillm/evaluate/accuracy.py",
    "minillm/evaluate/perplexity.py",
    "tests/evaluate/test_evaluate.py",
)

FAULTS = (
    Fault(
        "few-shot examples come from the test questions",
        ACCURACY,
        '(load_questions(split="dev") if examples is None',
        "(load_questions() if examples is None",
        f"{TESTS} -k examples_come_from_the_dev_split",
    ),
    Fault(
        "the report's few-shot examples come from the test questions",
        "minillm/evaluate/quality.py",
        'load_questions(split="dev")',
        "load_questions()",
        f"{TESTS} -k quality",
    ),
    Fault(
        "accuracy is averaged over subjects instead of questions",
        ACCURACY,
        "sum(map(sum, right.values())) / len(rows)",
        "sum(sum(hits) / len(hits) for hits in right.values()) / len(right)",
        f"{TESTS} -k mean_of_subjects",
    ),
    Fault(
        "no room is left for the answer letter",
        ACCURACY,
        "len(tokenizer.encode(prompt)) + 2 <=",
        "len(tokenizer.encode(prompt)) <=",
        f"{TESTS} -k room_for_a_letter",
    ),
    Fault(
        "a limit takes the first questions instead of spreading over all",
        ACCURACY,
        "rows = [rows[i * len(rows) // limit] for i in range(limit)]",
        "rows = rows[:limit]",
        f"{TESTS} -k limit",
    ),
    Fault(
        "few-shot examples come from every subject",
        ACCURACY,
        'shown[example["subject"]].append(example)',
        "[shown[row['subject']].append(example) for row in rows]",
        f"{TESTS} -k examples_come_from",
    ),
    Fault(
        "a letter outside the reported top tokens gets probability 0",
        ACCURACY,
        "if score == -math.inf]",
        "if score == math.inf]",
        f"{TESTS} -k outside_the_likeliest",
    ),
    Fault(
        "only three letters are compared",
        ACCURACY,
        "max(range(len(LETTERS)), key=score.__getitem__)",
        "max(range(len(LETTERS) - 1), key=score.__getitem__)",
        f"{TESTS} -k four_letters",
    ),
    Fault(
        "a token is scored by the previous token's score",
        PERPLEXITY,
        "at = position - begin + len(start)",
        "at = position - begin",
        f"{TESTS} -k hand_computed",
    ),
    Fault(
        "bits per byte are computed per character",
        PERPLEXITY,
        "len(text.encode())",
        "len(text)",
        f"{TESTS} -k bits_per_byte",
    ),
    Fault(
        "tokens in overlapping windows are scored twice",
        PERPLEXITY,
        "yield max(0, stop - window), scored, stop",
        "yield max(0, stop - window), max(0, stop - window), stop",
        f"{TESTS} -k score_every_token_once",
    ),
)
