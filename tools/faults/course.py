"""Faults in the lessons' machinery: what a learner gets, what a checker lets pass."""

from . import Fault

CHECKS, LESSON = "minillm/course/checks/__init__.py", "minillm/course/lesson.py"

FAULTS = (
    Fault(
        "a merge in one pass over the ranks is a right solution",
        "minillm/course/checks/lesson_01.py",
        '    same(fn(list("abcd"), ranked("ab c", "a b", "c d")), ["abc", "d"])\n',
        "",
        "tests/course/test_checkers.py -k mutant_fails_exactly",
    ),
    Fault(
        "a property that returns False holds",
        CHECKS,
        "return prop.hint if prop.holds(candidate) is False else None",
        "return prop.holds(candidate) and None",
        "tests/course/test_check.py -k just_return_false",
    ),
    Fault(
        "an error's line is where it passed through the cell first",
        CHECKS,
        "lines[-1]",
        "lines[0]",
        "tests/course/test_check.py -k reported_with_its_line",
    ),
    Fault(
        "a learner's notebook has the answer to a prediction",
        LESSON,
        'mine = value if kind == SOLUTION else "None"',
        "mine = value",
        "tests/course/test_lesson.py -k prediction",
    ),
    Fault(
        "a stub in a method names its class alone",
        LESSON,
        'return ".".join(names)',
        "return names[0]",
        "tests/course/test_lesson.py -k stub",
    ),
    Fault(
        "a lesson's cache is a block short",
        "minillm/course/adapters.py",
        "used = blocks[: -(-length // cache.k.shape[1])]",
        "used = blocks[: length // cache.k.shape[1]]",
        "tests/course/test_adapters.py -k equals_the_engines",
    ),
    Fault(
        "a write behind a tensor goes unseen",
        "minillm/course/interpret.py",
        "(memory[:GUARD] == by).all() and (memory[-GUARD:] == by).all()",
        "(memory[:GUARD] == by).all()",
        "tests/course/test_interpret.py -k write_outside_a_tensor",
    ),
    Fault(
        "a rate is measured against a floor",
        "minillm/course/predictions.py",
        "floor, most = None, floor",
        "pass",
        "tests/course/test_check.py -k rate",
    ),
    Fault(
        "one lesson that runs is enough for all to have run",
        "minillm/course/run.py",
        'results and all(each["ok"] for each in results)',
        'results and any(each["ok"] for each in results)',
        "tests/course/test_run.py",
    ),
    Fault(
        "a row that waits is drawn as idle",
        "minillm/course/draw_timeline.py",
        "states[row : row + 1, first:end] = WAITS",
        "states[row : row + 1, first:end] = IDLE",
        "tests/course/test_draw_timeline.py -k row_waits",
    ),
    Fault(
        "the lab writes over what a learner changed",
        "minillm/course/build.py",
        "if not (folder / path.name).exists():",
        "if path.name:",
        "tests/project/test_build.py -k lab",
    ),
)
