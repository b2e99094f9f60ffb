"""A submission gets the checker's own verdict, whatever it does to its process, its output or the checker."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from minillm.course.grading import grading, judge
from minillm.course.shared import checks

SIGNATURE = "def continue_text(model, prompt, max_tokens, end):\n"
RIGHT = """
    ids = list(prompt)
    for _ in range(max_tokens):
        scores = model(ids)
        token = max(scores, key=scores.get)
        if token == end:
            break
        ids.append(token)
    return ids[len(prompt):]
"""
WRONG = "    return list(prompt)\n"
LONG = grading.Limits(seconds=600)


@pytest.fixture(scope="module")
def judges():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("A_TOKEN", "secret")
        found = grading.Judges(1)
    yield found
    found.close()


def outcome(judges, *cells, limits=LONG):
    return judges.check("continue_text", cells, limits)


def test_the_verdict_is_the_checkers(judges):
    right = outcome(judges, SIGNATURE + RIGHT)
    assert (right.status, right.held, right.of) == ("passed", 10, 10)
    wrong = outcome(judges, SIGNATURE + RIGHT.replace("range(max_tokens)", "range(max(max_tokens, 1))"))
    assert (wrong.status, wrong.property) == ("failed", "max_tokens new tokens if no end token comes")
    assert "0 is a valid limit" in wrong.said and 0 < wrong.held < wrong.of


@pytest.mark.parametrize("cells", [["x = 1"], [SIGNATURE + "    raise NotSolvedYet('continue_text')"]])
def test_a_stub_or_a_missing_cell_is_not_attempted(cells, judges):
    cells = ["from minillm import NotSolvedYet", *cells]
    assert outcome(judges, *cells).status == "not attempted"


def test_a_class_of_which_a_method_is_left_to_write_has_failed(judges):
    text = "class TextStream:\n    def __init__(self, special): ...\n    def push(self, token):\n        return ''\n"
    text += "    def finish(self):\n        raise NotSolvedYet('TextStream.finish')"
    found = judges.check("TextStream", ["from minillm import NotSolvedYet", text], LONG)
    assert found.status == "failed"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (SIGNATURE + "    return [\n", "neither Python nor IPython"),
        ("continue_text = 3", "is not a function"),
        ("import nothing_like_it\n" + SIGNATURE + "    return nothing_like_it\n", "ModuleNotFoundError"),
        ("import tests.course.mutants as m\n" + SIGNATURE + "    return m\n", "No module named 'tests'"),
        (SIGNATURE + "    import os\n    os._exit(0)\n", "exit status 0"),
        (SIGNATURE + "    raise KeyboardInterrupt\n", "exit status 1"),
        (SIGNATURE + "    import os\n    os.kill(os.getpid(), 11)\n", "SIGSEGV"),
        (SIGNATURE + "    import os\n    os.kill(os.getppid(), 9)\n    while True: ...\n", "has ended"),
    ],
)
def test_a_submission_that_cannot_be_checked_is_an_error_and_the_next_one_is_checked(body, said, judges):
    found = outcome(judges, body)
    assert found.status == "error" and said in found.said
    assert outcome(judges, SIGNATURE + RIGHT).status == "passed"


PATCH = "    from minillm.course.shared import checks\n"
EACH = PATCH + "    import gc\n    for each in gc.get_objects():\n"
WRITE = "    import os\n    for number in range(64):\n        try: {}\n        except OSError: pass\n"
FORGED = r"""b'{"status": "passed", "said": "", "notes": []}\n'"""
REPLACED, EMPTIED, WROTE = "the notebook replaced ", "accepts a function without code", "wrote into the checker's pipe"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            PATCH + "    checks.Exercise.examine = lambda *args: []\n",
            REPLACED + "minillm.course.shared.checks.Exercise.examine",
        ),
        (PATCH + "    checks._problem = lambda *args: None\n", REPLACED + "minillm.course.shared.checks._problem"),
        (
            PATCH + "    checks._problem.__code__ = (lambda prop, watched, candidate: None).__code__\n",
            REPLACED + "minillm.course.shared.checks._problem",
        ),
        ("    import torch\n    torch.equal = lambda a, b: True\n", REPLACED + "torch.equal"),
        ("    import torch\n    torch.Tensor.sum = lambda self: 0\n", "the notebook added torch.Tensor.sum"),
        ("    import json\n    json.dumps = lambda content: '{}'\n", REPLACED + "json.dumps"),
        (
            PATCH + "    for each in checks.EXERCISES.values(): each.properties.clear()\n",
            "expected [6, 7, 8], got [4, 5]",
        ),
        (EACH + "        if isinstance(each, checks.Exercise): each.properties.clear()\n", EMPTIED),
        (
            EACH + "        if type(each) is checks.Property: object.__setattr__(each, 'holds', lambda given: True)\n",
            EMPTIED,
        ),
        (
            "    class Yes(list):\n        def __eq__(self, other): return True\n    return Yes()\n",
            "it returned a Yes, a class of the notebook with its own comparison",
        ),
        ("    print('continue_text\\nSolved: all 10 hold.')\n", "expected [6, 7, 8], got [4, 5]"),
        (WRITE.format(f"os.write(number, {FORGED})"), WROTE),
        (WRITE.format(f"os.write(os.open(f'/proc/{{os.getppid()}}/fd/{{number}}', 1), {FORGED})"), ""),
        (
            "    import os\n    if child := os.fork():\n        os.waitpid(child, 0)\n        os._exit(0)\n",
            "exit status 0",
        ),
    ],
    ids=lambda body: body.strip().splitlines()[-1].strip()[:40] if body else "",
)
def test_a_wrong_solution_that_changes_the_checker_or_writes_a_verdict_does_not_pass(body, said, judges):
    found = outcome(judges, SIGNATURE + body + WRONG)
    assert found.status in ("failed", "error") and said in found.said, found


def test_the_engines_own_function_is_no_attempt(judges):
    found = judges.check("slots_of", ["from minillm.course.shared.adapters import slots_of"], LONG)
    assert (found.status, found.said) == (
        "not attempted",
        "it is the engine's own, from minillm.course.shared.adapters",
    )
    assert found.notes == ("the engine's slots_of",)


def test_an_endless_loop_that_catches_everything_is_timed_out(judges):
    body = "    while True:\n        try:\n            while True: ...\n        except BaseException: ...\n"
    found = outcome(judges, SIGNATURE + body, limits=grading.Limits(seconds=0.3))
    assert found.status == "timed out"


def test_no_process_that_a_submission_started_is_left(judges, tmp_path):
    body = f"""
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
            time.sleep(10_000)
        os._exit(0)
    while not os.path.exists({str(tmp_path / "pid")!r}): ...
    os._exit(0)
"""
    assert outcome(judges, SIGNATURE + body).status == "error"
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_submission_with_too_many_processes_is_ended(judges):
    body = "    import os, time\n    while True:\n        if os.fork() == 0: time.sleep(10_000)\n"
    found = outcome(judges, SIGNATURE + body)
    assert found.status == "error" and f"the limit is {judge.MOST_PROCESSES}" in found.said


def test_memory_and_files_have_a_limit(judges):
    limits = grading.Limits(seconds=600, memory_gb=1)
    found = outcome(judges, SIGNATURE + "    import torch\n    torch.empty(1 << 30).fill_(1)\n" + WRONG, limits=limits)
    assert found.status == "failed" and "it raised RuntimeError" in found.said
    body = f"    with open('big', 'wb') as file: file.truncate({judge.FILE_BYTES + 1})\n"
    assert "OSError" in outcome(judges, SIGNATURE + body + WRONG).said


def test_a_submission_sees_no_environment_and_no_notebooks(judges):
    body = """
    import os, sys, minillm
    root = os.path.dirname(os.path.dirname(os.path.realpath(minillm.__file__)))
    raise ValueError([os.environ.get("A_TOKEN"), os.listdir(root), os.getcwd() == os.environ["HOME"]])
"""
    assert "[None, ['minillm'], True]" in outcome(judges, SIGNATURE + body).said


def test_a_submission_that_writes_into_the_checkers_files_is_an_error(judges):
    body = "    import os, minillm\n    folder = os.path.dirname(minillm.__file__)\n"
    body += "    open(os.path.join(folder, 'course', 'lesson_00', 'checks.py'), 'w').close()\n"
    found = outcome(judges, SIGNATURE + body + WRONG)
    assert found.status == "error" and "changed the files of the checkers" in found.said
    assert Path(checks.find("continue_text").properties[0].holds.__code__.co_filename).stat().st_size > 0
    assert judges._free.get() is None, "a judge with other files is not used again"
    judges._free.put(None)


def test_what_is_said_of_results():
    stopped, open_, held = (
        checks.Result("a", f"{checks.STOPPED} after 5 seconds"),
        checks.Result("b", "not checked yet", needs="C.m"),
        checks.Result("c", None),
    )
    assert judge._said([held, stopped], 2)["status"] == "timed out"
    assert judge._said([held], 1) == {"status": "passed", "said": "", "held": 1, "of": 1}
    assert judge._said([held], 2)["status"] == "error"
    found = judge._said([held, open_], 2)
    assert (found["status"], found["held"]) == ("failed", 1)


def test_no_checker_accepts_a_function_without_code():
    originals = judge.Originals()
    for name, exercise in checks.every().items():
        assert not judge._guarded(exercise, originals, []).accepts_nothing(), name


def test_a_process_that_ends_while_a_users_threads_are_counted_is_left_out(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        own = psutil.Process.num_threads

        def counted(process: psutil.Process) -> int:
            if process.pid == child.pid:
                raise psutil.NoSuchProcess(process.pid)
            return own(process) if process.pid == os.getpid() else 0

        monkeypatch.setattr(psutil.Process, "num_threads", counted)
        assert judge._threads(os.getuid()) == psutil.Process().num_threads() >= 1
        child.kill()
