"""Faults in the course tooling: learner notebooks, checkers, drawings."""

from . import Fault

CHECKS, LESSON = "minillm/course/checks/__init__.py", "minillm/course/lesson.py"
HELD_OUT, HELD_OUT_TESTS = "minillm/course/held_out.py", "tests/course/test_held_out.py"

FAULTS = (
    Fault(
        "a BPE merge in a single pass over the ranks passes the check",
        "minillm/course/checks/lesson_01.py",
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
        "tests/course/test_check.py -k just_return_false",
    ),
    Fault(
        "an error is reported with the first line in the cell, not the last",
        CHECKS,
        "lines[-1]",
        "lines[0]",
        "tests/course/test_check.py -k reported_with_its_line",
    ),
    Fault(
        "a learner's notebook contains the answer to a prediction",
        LESSON,
        'mine = value if kind == SOLUTION else "None"',
        "mine = value",
        "tests/course/test_lesson.py -k prediction",
    ),
    Fault(
        "the stub of a method names only its class",
        LESSON,
        'return ".".join(names)',
        "return names[0]",
        "tests/course/test_lesson.py -k stub",
    ),
    Fault(
        "a lesson's cache is one block short",
        "minillm/course/adapters.py",
        "used = blocks[: -(-length // cache.k.shape[1])]",
        "used = blocks[: length // cache.k.shape[1]]",
        "tests/course/test_adapters.py -k equals_the_engines",
    ),
    Fault(
        "a write past the end of a tensor is not detected",
        "minillm/course/interpret.py",
        "(memory[:GUARD] == by).all() and (memory[-GUARD:] == by).all()",
        "(memory[:GUARD] == by).all()",
        "tests/course/test_interpret.py -k write_outside_a_tensor",
    ),
    Fault(
        "a rate is compared with a lower bound instead of an upper one",
        "minillm/course/predictions.py",
        "floor, most = None, floor",
        "pass",
        "tests/course/test_check.py -k rate",
    ),
    Fault(
        "a run passes if any lesson passes",
        "minillm/course/run.py",
        'results and all(each["ok"] for each in results)',
        'results and any(each["ok"] for each in results)',
        "tests/course/test_run.py",
    ),
    Fault(
        "a waiting row is drawn as idle",
        "minillm/course/draw_timeline.py",
        "states[row : row + 1, first:end] = WAITS",
        "states[row : row + 1, first:end] = IDLE",
        "tests/course/test_draw_timeline.py -k row_waits",
    ),
    Fault(
        "a corrected lesson replaces a copy that the learner changed",
        "minillm/course/lab.py",
        "(path.name in copied and _held(path) == copied[path.name])",
        "True",
        "tests/course/test_lab.py",
    ),
    Fault(
        "a learner's copy carries the outputs",
        "minillm/course/lab.py",
        "cell.outputs, cell.execution_count = [], None",
        "cell.execution_count = None",
        "tests/course/test_lab.py",
    ),
    Fault(
        "lessons run on a GPU that the doctor advises against",
        "minillm/course/tiers.py",
        "problem = gpu_problem() if",
        "problem = None if",
        "tests/course/test_check.py",
    ),
    Fault(
        "a figure loses its text alternative",
        "minillm/course/figures.py",
        '{"alt": words}',
        "{}",
        "tests/course/test_figures.py",
    ),
    Fault(
        "a long listing is not folded",
        "minillm/course/lesson.py",
        "<= LISTING_LINES:",
        "<= 10_000:",
        "tests/course/test_lesson.py",
    ),
    Fault(
        "a learner's assertion counts as the checker's finding",
        "minillm/course/checks/__init__.py",
        "if _raised_by(candidate, error, prop):",
        "if False:",
        "tests/course/test_check.py",
    ),
    Fault(
        "sys.exit in a solution ends its check",
        "minillm/course/checks/__init__.py",
        "except (Exception, SystemExit) as error:",
        "except Exception as error:",
        "tests/course/test_check.py",
    ),
    Fault(
        "stray loads and stores are not counted",
        "minillm/course/interpret.py",
        "found[what] += int(stray.sum())",
        "found[what] += 0",
        "tests/course/test_interpret.py",
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
        "planted outliers stay in the norms after lesson 05's block",
        "minillm/course/weight_formats.py",
        "for tensor in (weight.weight, getattr(layer, norm))]",
        "for tensor in (weight.weight,)]",
        f"{HELD_OUT_TESTS} -k planted",
    ),
    Fault(
        "a lesson's minutes include its optional sections",
        "tools/lesson_minutes.py",
        'return "optional" in self.title.lower()',
        "return False",
        "tests/project/test_notebooks.py -k minutes",
    ),
)
