"""The output of `check`, `yours`, `compare` and `tier`."""

import functools
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from minillm import NotSolvedYet
from minillm.course import check, compare, doctor, look_back, solved, tier, yours
from minillm.course.shared import checks, predictions
from minillm.errors import ConfigError

checks.every()  # before EXERCISES is replaced, or they would be registered in what replaces it


@pytest.fixture
def doubled(monkeypatch):
    monkeypatch.setattr(checks, "EXERCISES", {})
    exercise = checks.Exercise("doubled")

    @exercise.example
    def _(function):
        assert function(2) == 4

    @exercise.property("negative numbers", hint="2 * x works for all of them")
    def _(function):
        assert function(-3) == -6, f"doubled(-3) is -6, not {function(-3)}"

    @exercise.property("zero", hint="nothing divides by it")
    def _(function):
        return function(0) == 0

    return exercise


def report(capsys, function) -> list[str]:
    function.__name__ = "doubled"
    check(function)
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_a_correct_solution_passes_every_property(doubled, capsys):
    assert report(capsys, lambda x: 2 * x) == [
        "doubled",
        "✓ the example",
        "✓ negative numbers",
        "✓ zero",
        "Solved: all 3 hold.",
    ]


def test_a_failed_property_is_reported_with_its_result_and_a_hint(doubled, capsys):
    said = report(capsys, lambda x: abs(2 * x))
    assert said[2:] == [
        "✗ negative numbers",
        "doubled(-3) is -6, not 6",
        "2 * x works for all of them",
        "✓ zero",
        "2 of 3 hold.",
    ]


def test_a_property_may_just_return_false(doubled, capsys):
    assert report(capsys, lambda x: 2 * x or 1)[3:] == ["✗ zero", "nothing divides by it", "2 of 3 hold."]


def test_an_exception_is_reported_with_its_line(doubled, capsys):
    def divides(x):
        return x / x * 2 * x

    line = divides.__code__.co_firstlineno + 1
    said = report(capsys, divides)
    assert f"it raised ZeroDivisionError: division by zero (line {line} of its cell)" in said


def test_a_solution_that_exits_is_reported(doubled, capsys):
    def leaves(x):
        sys.exit(1)

    assert any("it raised SystemExit: 1" in line for line in report(capsys, leaves))


SEVERAL = "Start with the first ✗: the others may have the same cause."


def test_a_missing_return_is_named_instead_of_the_hint(doubled, capsys):
    def computes(x):
        x *= 2

    said = report(capsys, computes)
    missing = "it returned None: does every path through it end in `return`?"
    assert said[1:] == ["✗ the example", missing, "✗ negative numbers", "✗ zero", f"0 of 3 hold. {SEVERAL}"]


def test_of_several_failures_only_the_first_is_explained(doubled, capsys):
    said = report(capsys, lambda x: 4 if x == 2 else 1)
    assert said[1:] == [
        "✓ the example",
        "✗ negative numbers",
        "doubled(-3) is -6, not 1",
        "2 * x works for all of them",
        "✗ zero",
        f"1 of 3 hold. {SEVERAL}",
    ]


def test_after_the_example_no_other_hint_is_shown(doubled, capsys):
    """It is about another mistake as often as not."""
    said = report(capsys, lambda x: 2 * x if x == 0 else 5)
    assert said[1:2] + said[3:6] == [
        "✗ the example",
        "compare with the example above",
        "✗ negative numbers",
        "✓ zero",
    ]


def test_the_hint_about_an_exception_follows_it_with_its_line(monkeypatch, capsys):
    monkeypatch.setattr(checks, "EXERCISES", {})
    exercise = checks.Exercise("doubled")

    @exercise.property("it doubles", hint="another hint")
    def _(function):
        try:
            function(1)
        except ZeroDivisionError as error:
            raise checks.Explained("do not divide") from error

    def divides(x):
        return x / 0

    line = divides.__code__.co_firstlineno + 1
    said = f"it raised ZeroDivisionError: division by zero (line {line} of its cell)"
    assert report(capsys, divides)[2:4] == [said, "do not divide"]


def test_an_endless_loop_is_stopped_and_reported_once(doubled, capsys):
    def waits(x):
        while True:
            try:
                x += 1
            except Exception:
                continue

    doubled.seconds = 0.1
    said = report(capsys, waits)
    stopped = "it was stopped after 0.1 seconds: does each of its loops end?"
    assert said[1:] == ["✗ the example", stopped, "✗ negative numbers", "✗ zero", f"0 of 3 hold. {SEVERAL}"]


@pytest.mark.parametrize("decorator", ["", "@property", "@staticmethod", "@classmethod"])
def test_an_error_inside_a_class_is_reported_with_its_line(monkeypatch, capsys, decorator):
    monkeypatch.setattr(checks, "EXERCISES", {})
    exercise = checks.Exercise("Held")

    @exercise.property("it holds what it is given", hint="store it")
    def _(made):
        got = made().get
        assert (got if decorator == "@property" else got()) == 1

    arguments = {"": "self", "@property": "self", "@classmethod": "cls"}.get(decorator, "")
    code = f"class Held:\n    {decorator}\n    def get({arguments}):\n        return 1 / 0"
    space = {"__name__": "a_notebook_without_a_file"}
    exec(compile(code, "/tmp/a_cell.py", "exec"), space)
    check(space["Held"])
    assert "it raised ZeroDivisionError: division by zero (line 4 of its cell)" in capsys.readouterr().out


def test_a_result_of_another_type_is_told_so_without_a_hint(monkeypatch, capsys):
    monkeypatch.setattr(checks, "EXERCISES", {})
    exercise = checks.Exercise("counted")

    @exercise.property("it counts", hint="add 1")
    def _(function):
        checks.assert_int(function(1)[0], "counted(1)")
        checks.assert_list(function(1), "ints")

    for result, wanted in (
        ([1.0], "counted(1): expected an int, got 1.0, a float: wrap it in `int()`"),
        ([1.5], "counted(1): expected an int, got 1.5, a float"),
        ((1,), "expected a list of ints, got a tuple"),
        ([np.float64(2)], "counted(1): expected an int, got np.float64(2.0), a float64: wrap it in `int()`"),
        (np.array([1]), "expected a list of ints, got an ndarray: `.tolist()` makes a list of it"),
    ):

        def counted(x, result=result):
            return result

        check(counted)
        assert [line.strip() for line in capsys.readouterr().out.splitlines()][2:] == [wanted, "0 of 1 hold."]


def test_an_error_inside_a_notebooks_class_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(checks, "EXERCISES", {})
    exercise = checks.Exercise("Held")

    @exercise.property("it holds what it is given", hint="store it")
    def _(made):
        assert made().get() == 1

    space = {"__name__": "a_notebook_without_a_file"}
    exec("class Held:\n    def get(self):\n        return self.value", space)
    check(space["Held"])
    said = capsys.readouterr().out
    assert "it raised AttributeError: 'Held' object has no attribute 'value'" in said and "store it" in said


def test_a_solutions_own_assertion_is_not_taken_for_the_checkers(monkeypatch, capsys):
    monkeypatch.setattr(checks, "EXERCISES", {})
    exercise = checks.Exercise("Held")

    @exercise.property("it holds what it is given", hint="store it")
    def _(made):
        assert made().get() == 1, "it holds something else"

    for written, said in (("assert False, 'empty'", "it raised AssertionError: empty"), ("return 2", "something else")):
        space = {"__name__": "a_notebook_without_a_file"}
        exec(f"class Held:\n    def get(self):\n        {written}", space)
        check(space["Held"])
        assert said in capsys.readouterr().out


def test_a_stub_is_reported_as_unsolved_without_an_exception(doubled, capsys):
    def stub(x):
        raise NotSolvedYet("doubled")

    assert report(capsys, stub)[0].startswith("doubled: not solved yet")


def test_a_correct_solution_that_still_has_the_stubs_line_is_told_to_delete_it(doubled, capsys):
    def early(x):
        for each in (2 * x, x):
            return each
        raise NotSolvedYet("doubled")

    said = report(capsys, early)
    assert not solved(early) and said[1:4] == ["✓ the example", "✓ negative numbers", "✓ zero"]
    assert said[4:] == [
        "All 3 hold. Now delete the line `raise NotSolvedYet`: as long as it is there, this is not solved."
    ]


@pytest.fixture
def counter(monkeypatch):
    monkeypatch.setattr(checks, "EXERCISES", {})
    exercise = checks.Exercise("Counter")

    @exercise.example
    def _(make):
        assert make().start() == 0, f"a counter starts at 0, not {make().start()}"

    @exercise.property("it counts", hint="add 1")
    def _(make):
        counter = make()
        counter.start()
        return counter.up() == 1

    @exercise.property("it starts over", hint="set it to 0")
    def _(make):
        counter = make()
        counter.reset()
        return counter.start() == 0


def stub(name):
    def method(self):
        raise NotSolvedYet(f"Counter.{name}")

    return method


STUBS = {name: stub(name) for name in ("start", "up", "reset")}


@pytest.mark.parametrize(
    ("written", "example", "last"),
    [
        (
            {"start": lambda self: 0},
            ["✓ the example"],
            "1 of 3 hold so far. Still to write: Counter.up, Counter.reset.",
        ),
        (
            {"start": lambda self: 1},
            ["✗ the example", "a counter starts at 0, not 1", "compare with the example above"],
            "0 of 3 hold so far. Still to write: Counter.up, Counter.reset.",
        ),
    ],
    ids=["right", "wrong"],
)
def test_what_holds_so_far_is_reported_of_a_class_with_stubs_left(counter, written, example, last, capsys):
    check(type("Counter", (), STUBS | written))
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [
        "Counter",
        *example,
        "– it counts (needs Counter.up)",
        "– it starts over (needs Counter.reset)",
        last,
    ]


def test_a_class_of_stubs_is_reported_as_unsolved(counter, capsys):
    check(type("Counter", (), STUBS))
    assert capsys.readouterr().out.startswith("Counter: not solved yet")


def test_a_method_that_still_has_the_stubs_line_is_not_called_solved(counter, capsys):
    def up(self):
        if self:
            return 1
        raise NotSolvedYet("Counter.up")

    check(type("Counter", (), {"start": lambda self: 0, "up": up, "reset": lambda self: None}))
    assert "All 3 hold. Now delete the line" in capsys.readouterr().out


def test_an_unknown_exercise_error_lists_the_available_ones(doubled):
    with pytest.raises(ValueError, match="no exercise is called 'tripled'; there are: .*doubled"):
        checks.find("tripled")


def test_a_solution_with_another_name_is_told_so(doubled, capsys):
    for candidate, name in ((abs, "abs"), (lambda x: 2 * x, "<lambda>"), (functools.partial(max, 1), "functools")):
        check(candidate)
        said = capsys.readouterr().out
        assert said.startswith(name) and "is not the name of an exercise" in said


def test_yours_returns_the_learners_function_or_the_engines_for_a_stub():
    def stub():
        raise NotSolvedYet("f")

    assert yours(stub, lambda: "engine")() == "engine" and not solved(stub) and solved(lambda: "mine")
    assert not solved(SimpleNamespace(fn=stub)), "a kernel"
    assert yours(lambda: "mine", lambda: "engine")() == "mine"


def test_yours_returns_the_learners_class_or_the_engines_if_a_method_is_a_stub():
    class Engine: ...

    class Half:
        number = 1

        def done(self): ...

        def to_do(self):
            raise NotSolvedYet("to_do")

    class Whole(Engine):
        def done(self): ...

    assert yours(Half, Engine) is Engine and not solved(Half)
    assert yours(Whole, Engine) is Whole and solved(Whole)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (
            {"measured": 3.0, "prediction": 2.0, "floor": 1.5},
            "predicted 2 ms, floor 1.5 ms, measured 3 ms (2.0 times the floor)",
        ),
        ({"measured": 3.0}, "no prediction, measured 3 ms"),
        ({"measured": 5.0, "most": 8.0}, "no prediction, at most 8 ms, measured 5 ms (62% of what is possible)"),
        ({"measured": 1.0, "floor": 2.0}, "no prediction, floor 2 ms, measured 1 ms (0.5 times the floor)"),
        ({"measured": None, "prediction": 3, "floor": 2.0}, "predicted 3 ms, floor 2 ms, not measured"),
        ({"measured": None, "most": 2.0}, "no prediction, at most 2 ms, not measured"),
    ],
)
def test_a_prediction_is_printed_with_bound_and_measurement(numbers, said, capsys):
    compare("a step", unit="ms", **numbers)
    assert capsys.readouterr().out == f"a step: {said}\n"


def test_predictions_are_looked_back_on_the_farthest_off_first(monkeypatch, capsys):
    monkeypatch.setattr(predictions, "_compared", {})
    assert look_back().startswith("no predicted number to look back on")
    compare("a", unit="ms", measured=10.0, prediction=20)
    compare("bc", unit="GB", measured=9.0, prediction=3.0)
    compare("kept", unit="%", measured=50.3, prediction=50)
    compare("loss", unit="points", measured=-0.2, prediction=1)
    compare("none", unit="ms", measured=1.0)
    compare("failed", unit="ms", measured=None, prediction=7)
    compare("taken back", unit="ms", measured=1.0, prediction=5)
    compare("taken back", unit="ms", measured=1.0)
    compare("word", unit="ms", measured=1.0, prediction="1 ms")
    assert "word: predicted '1 ms' (write a number, without the unit), measured 1 ms" in capsys.readouterr().out
    assert [line.split() for line in look_back().split("\n")] == [
        ["predicted", "measured"],
        ["bc", "3", "9", "GB:", "too", "low", "by", "a", "factor", "of", "3.0"],
        ["a", "20", "10", "ms:", "too", "high", "by", "a", "factor", "of", "2.0"],
        ["kept", "50", "50.3", "%:", "as", "measured"],
        ["loss", "1", "-0.2", "points:", "no", "factor:", "one", "of", "the", "two", "is", "not", "above", "0"],
        ["failed", "7", "-", "ms:", "not", "measured"],
    ]


def test_columns_are_as_wide_as_the_longest_number(monkeypatch):
    monkeypatch.setattr(predictions, "_compared", {})
    compare("a", unit="ms", measured=10.0, prediction=20)
    compare("b", unit="ms", measured=0.5, prediction=1e9)
    head, far, near = look_back().split("\n")
    assert " ".join(far.split()) == "b 1,000,000,000 0.5 ms: too high by a factor of 2,000,000,000.0"
    assert head.index("measured") + len("measured") == far.index("0.5") + 3 == near.index("10  ms") + 2


def test_a_rate_is_printed_with_its_upper_bound(capsys):
    compare("reading", unit="GB/s", measured=300.0, floor=1200.0)
    assert capsys.readouterr().out.endswith("at most 1,200 GB/s, measured 300 GB/s (25% of what is possible)\n")


def test_a_percentage_is_printed_without_a_space(capsys):
    compare("found", unit="% of all", measured=45.0, prediction=30.0)
    assert capsys.readouterr().out == "found: predicted 30% of all, measured 45% of all\n"
    compare("slots in use", unit="%", measured=16.4, prediction=30.0, floor=0.0, most=100.0)
    assert capsys.readouterr().out.startswith("slots in use: predicted 30%, floor 0%, at most 100%, measured 16.4% ")


def test_the_cpu_tier_uses_the_embedded_model(monkeypatch):
    monkeypatch.setenv("MINILLM_TIER", "cpu")
    here = tier()
    assert (here.name, here.model, here.device, here.trained) == ("cpu", None, "cpu", True)


def pretend_gpu(monkeypatch, capability=(9, 0), gib=141.0):
    properties = SimpleNamespace(
        name="a GPU", major=capability[0], minor=capability[1], total_memory=int(gib * doctor.GIB)
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)


@pytest.mark.parametrize(
    ("capability", "gib", "runs"),
    [((7, 5), 15.6, False), ((8, 6), 3.9, False), ((8, 6), 7.8, True), ((9, 0), 141.0, True)],
    ids=["T4", "small", "8 GB", "H200"],
)
def test_doctor_and_lessons_agree_whether_a_gpu_will_do(capability, gib, runs, monkeypatch):
    pretend_gpu(monkeypatch, capability, gib)
    monkeypatch.delenv("MINILLM_TIER", raising=False)
    findings = doctor.examine()
    assert (doctor.tier(findings) != "cpu") == (tier().name == "gpu") == runs
    (found,) = [finding for finding in findings if finding.name == "GPU"]
    assert runs or "lessons run on the CPU" in found.fix
    monkeypatch.setenv("MINILLM_TIER", "gpu")
    if not runs:
        with pytest.raises(ConfigError, match="MINILLM_TIER=gpu, but .*: unset it"):
            tier()


def test_the_gpu_tier_without_weights_uses_labeled_random_weights(monkeypatch):
    pretend_gpu(monkeypatch)
    monkeypatch.delenv("MINILLM_TIER", raising=False)
    monkeypatch.setattr("minillm.course.shared.tiers.gemma_directory", lambda: None)
    here = tier()
    assert (here.name, here.model, here.options["load_format"], here.trained) == ("gpu", "gemma-2b", "dummy", False)
    assert "random weights" in here.label


def test_the_gpu_tier_uses_real_weights_if_available(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    pretend_gpu(monkeypatch)
    monkeypatch.setenv("MINILLM_TIER", "gpu")
    monkeypatch.setenv("MINILLM_GEMMA", str(tmp_path))
    here = tier()
    assert (here.model, here.trained, here.label) == (str(tmp_path), True, "Gemma 2B, trained")
    assert "load_format" not in here.options


@pytest.mark.parametrize(("wanted", "message"), [("tpu", "cpu, gpu or auto"), ("gpu", "sees no GPU")])
def test_an_impossible_tier_is_rejected(wanted, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("MINILLM_TIER", wanted)
    with pytest.raises(ConfigError, match=message):
        tier()
