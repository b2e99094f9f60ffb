"""Faults in accuracy and perplexity."""

from . import Fault

ACCURACY, PERPLEXITY, TESTS = (
    "minillm/evaluate/accuracy.py",
    "minillm/evaluate/perplexity.py",
    "tests/evaluate/test_evaluate.py",
)

COMPARE, COMPARE_TESTS = "minillm/evaluate/compare.py", "tests/evaluate/test_compare.py"
LM_EVAL, LM_EVAL_TESTS = "minillm/evaluate/lm_eval.py", "tests/evaluate/test_lm_eval.py"

FAULTS = (
    Fault(
        "KL is measured in the other direction",
        COMPARE,
        "(wanted.exp() * (wanted - found))",
        "(found.exp() * (found - wanted))",
        f"{COMPARE_TESTS} -k definitions",
    ),
    Fault(
        "the last window, which is shorter, counts as much as the others",
        COMPARE,
        "return Divergence(math.exp(surprise / self.tokens), divergence / self.tokens)",
        "return Divergence(*(each / len(self.rows) / WINDOW for each in (surprise, divergence)))",
        f"{COMPARE_TESTS} -k definitions",
    ),
    Fault(
        "the interval is that of two independent accuracies",
        COMPARE,
        "math.sqrt(b + c - (b - c) ** 2 / n) / n",
        "math.sqrt((b + c) / 2 * (1 - (b + c) / 2 / n)) * 2 / n",
        f"{COMPARE_TESTS} -k agresti",
    ),
    Fault(
        "answers that became correct count as lost",
        COMPARE,
        "lost = sum(old and not new for",
        "lost = sum(old != new for",
        f"{COMPARE_TESTS} -k agresti",
    ),
    Fault(
        "the best calibration is reported instead of the median",
        COMPARE,
        "[(len(found) - 1) // 2]",
        "[0]",
        f"{COMPARE_TESTS} -k median_is",
    ),
    Fault(
        "recipes are checked only when their turn comes",
        COMPARE,
        "check_methods(llm.engine.model, chosen)",
        "pass",
        f"{COMPARE_TESTS} -k before_any_work",
    ),
    Fault(
        "lm-eval: a context that is too long loses its end",
        LM_EVAL,
        "(context + continuation)[-(self.max_length + 1) :]",
        "(context[: self.max_length + 1 - len(continuation)] + continuation)",
        f"{LM_EVAL_TESTS} -k log_likelihoods_are",
    ),
    Fault(
        "lm-eval: a text that begins with <bos> gets another",
        LM_EVAL,
        "add_special_tokens = not string.startswith(self.tokenizer.token(self.prefix_token_id))",
        "add_special_tokens = True",
        f"{LM_EVAL_TESTS} -k log_likelihoods_are",
    ),
    Fault(
        "lm-eval: a continuation is greedy if its first token is",
        LM_EVAL,
        "scores[i] = sum(logprobs), logprobs == best",
        "scores[i] = sum(logprobs), logprobs[0] == best[0]",
        f"{LM_EVAL_TESTS} -k greedy_continuations",
    ),
    Fault(
        "accuracy is averaged over subjects instead of questions",
        ACCURACY,
        "return sum(self.correct) / len(self.correct)",
        "return sum(self.by_subject().values()) / len(self.by_subject())",
        f"{TESTS} -k mean_of_subjects",
    ),
    Fault(
        "no room is left for the answer letter",
        ACCURACY,
        "longest = context - 1 - max(map(len, letter_tokens(tokenizer)))",
        "longest = context",
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
        "only three letters are compared",
        ACCURACY,
        "max(range(len(LETTERS)), key=score.__getitem__)",
        "max(range(len(LETTERS) - 1), key=score.__getitem__)",
        f"{TESTS} -k four_letters",
    ),
    Fault(
        "tokens in overlapping windows are scored twice",
        PERPLEXITY,
        "yield max(0, stop - window), scored, stop",
        "yield max(0, stop - window), max(0, stop - window), stop",
        f"{TESTS} -k score_every_token_once",
    ),
    Fault(
        "perplexity begins each window with a bos_token that the tokenizer does not add",
        PERPLEXITY,
        "usual = [] if llm.tokenizer is None else llm.tokenizer.prefix",
        "usual = [] if llm.tokenizer is None else [llm.tokenizer.bos_token_id]",
        "tests/evaluate/test_prefix.py -k perplexity_is",
    ),
)
