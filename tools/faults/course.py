"""Faults in the course tooling: learner notebooks, checkers, drawings."""

from . import Fault

CHECKS, LESSON = "minillm/course/shared/checks.py", "minillm/course/making/lesson.py"
JUDGE = "minillm/course/grading/judge.py"
HELD_OUT, HELD_OUT_TESTS = "minillm/course/shared/held_out.py", "tests/course/shared/test_held_out.py"

FAULTS = (
    Fault(
        "a BPE merge in a single pass over the ranks passes the check",
        "minillm/course/lesson_01/checks.py",
        '    same(fn(list("abcd"), ranked("ab c", "a b", "c d")), ["abc", "d"])\n'
        '    same(fn(list("abab"), ranked("ab a", "a b")), ["aba", "b"])\n'
        '    same(fn(list("abcab"), ranked("abc a", "ab c", "a b")), ["abca", "b"])\n',
        "",
        "tests/course/test_checkers.py -k mutant_fails_exactly",
    ),
    Fault(
        "a property that returns False passes",
        CHECKS,
        "return prop.hint if prop.holds(watched) is False else None",
        "return prop.holds(watched) and None",
        "tests/course/shared/test_checks.py -k just_return_false",
    ),
    Fault(
        "an error is reported with the first line in the cell, not the last",
        CHECKS,
        "lines[-1]",
        "lines[0]",
        "tests/course/shared/test_checks.py -k reported_with_its_line",
    ),
    Fault(
        "the stub of a method names only its class",
        LESSON,
        'return ".".join(names)',
        "return names[0]",
        "tests/course/making/test_lesson.py -k stub",
    ),
    Fault(
        "a lesson's cache is one block short",
        "minillm/course/shared/adapters.py",
        "used = blocks[: -(-length // cache.k.shape[1])]",
        "used = blocks[: length // cache.k.shape[1]]",
        "tests/course/shared/test_adapters.py -k equals_the_engines",
    ),
    Fault(
        "a function that fails its check serves with everything that the learner wrote",
        "minillm/course/grading/earlier.py",
        ".examine(candidate) if each.problem]",
        ".examine(candidate) if each.needs]",
        "tests/course/grading/test_earlier.py -k wrong_or_missing",
    ),
    Fault(
        "a solution that uses a variable of its own cell is refused by lesson 99",
        "minillm/course/grading/earlier.py",
        "return constant or (in_exercise and",
        "return constant or (False and",
        "tests/course/grading/test_earlier.py -k variable_of_its_own_cell",
    ),
    Fault(
        "a solved order of the queue is lost if the sharing was skipped",
        "minillm/course/grading/earlier.py",
        "if order is None and share is None:",
        "if order is None or share is None:",
        "tests/course/grading/test_earlier.py -k supplies_what_was_skipped",
    ),
    Fault(
        "a waiting row is drawn as idle",
        "minillm/course/lesson_10/timeline.py",
        "states[row : row + 1, first:end] = WAITS",
        "states[row : row + 1, first:end] = IDLE",
        "tests/course/lesson_10/test_timeline.py -k row_waits",
    ),
    Fault(
        "other programs are measured before a notebook is executed, not meanwhile",
        "minillm/course/making/build.py",
        "    with other_load() as others:  # ends after the kernel, whose time is this process's from then on\n"
        "        notebook =",
        "    with other_load() as others:\n        pass\n    notebook =",
        "tests/project/test_build.py -k busy_machine",
    ),
    Fault(
        "a figure's caption swallows what looks like a tag",
        "minillm/course/shared/figures.py",
        "html.escape(words))",
        "words)",
        "tests/course/shared/test_figures.py",
    ),
    Fault(
        "a corrected lesson replaces a copy that the learner changed",
        "minillm/course/making/lab.py",
        "(path.name in copied and _held(path) == copied[path.name])",
        "True",
        "tests/course/making/test_lab.py",
    ),
    Fault(
        "a learner's copy carries the outputs",
        "minillm/course/making/lab.py",
        "cell.outputs, cell.execution_count = [], None",
        "cell.execution_count = None",
        "tests/course/making/test_lab.py",
    ),
    Fault(
        "lessons run on a GPU that the doctor advises against",
        "minillm/course/shared/tiers.py",
        "problem = gpu_problem() if",
        "problem = None if",
        "tests/course/shared/test_checks.py",
    ),
    Fault(
        "a long listing is not folded",
        "minillm/course/making/lesson.py",
        "<= LISTING_LINES:",
        "<= 10_000:",
        "tests/course/making/test_lesson.py",
    ),
    Fault(
        "lessons measure KL from the quantized model to the original",
        HELD_OUT,
        "(self.probabilities * (self.before - now))",
        "(now.exp() * (now - self.before))",
        f"{HELD_OUT_TESTS} -k definitions",
    ),
    Fault(
        "lessons score each token by the prediction after it",
        HELD_OUT,
        "now[:, :-1].gather(",
        "now[:, 1:].gather(",
        f"{HELD_OUT_TESTS} -k definitions",
    ),
    Fault(
        "lessons measure on the text that they calibrate on",
        HELD_OUT,
        "_rows_of(load_text(), rows, length, SEED)",
        "calibration_text(rows, length)",
        f"{HELD_OUT_TESTS} -k not_calibration_text",
    ),
    Fault(
        "the speed with an 8-bit cache is shown as that of a 16-bit one",
        "minillm/course/lesson_08/choices.py",
        'if row["kv_cache_dtype"] == "bfloat16"',
        'if row["kv_cache_dtype"]',
        "tests/course/lesson_08/test_set_ups.py -k 16_bit_cache",
    ),
    Fault(
        "attention on a learner's codes sees the next token",
        "minillm/course/lesson_08/small_caches.py",
        "torch.arange(length - len(q), length,",
        "torch.arange(length - len(q) + 1, length + 1,",
        "tests/course/lesson_08/test_set_ups.py -k learners_cache",
    ),
    Fault(
        "a student's rounded weights pass no gradient on",
        "minillm/course/lesson_08/four_bits.py",
        "return self.rounded(self.matrix)",
        "return self.rounded(self.matrix.detach())",
        "tests/course/lesson_08/test_set_ups.py -k learns",
    ),
    Fault(
        "a notebook that replaces a function of its checker is graded by it",
        JUDGE,
        "if changed := originals.changed() or tampered:",
        "if changed := tampered[:0]:",
        "tests/course/grading/test_judge.py -k writes_a_verdict",
    ),
    Fault(
        "submissions are checked with the grader's environment",
        "minillm/course/grading/grading.py",
        "kept = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}",
        "kept = dict(os.environ)",
        "tests/course/grading/test_judge.py -k environment",
    ),
    Fault(
        "the grader runs statements that an exercise does not need",
        "minillm/course/grading/submission.py",
        "return [each for count, each in enumerate(every) if count in wanted]",
        "return list(every)",
        "tests/course/grading/test_submission.py -k only_what",
    ),
    Fault(
        "a learner's text is a formula in the table",
        "minillm/course/grading/grade_table.py",
        "rows.writerow([_inert(cell) for cell in cells])",
        "rows.writerow(cells)",
        "tests/course/grading/test_grading.py -k csv",
    ),
    Fault(
        "the learners' copy has the talking points",
        "minillm/course/making/export.py",
        '"docs/talking_points.md", ',
        "",
        "tests/course/making/test_export.py -k no_solution",
    ),
)
