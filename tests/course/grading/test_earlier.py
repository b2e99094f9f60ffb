"""Lesson 99: what a learner wrote in earlier notebooks replaces parts of the engine, if it is right."""

import nbformat
import numpy as np
import pytest

from minillm import LLM, SamplingParams, using
from minillm.course.grading import earlier
from minillm.scheduler.policies import FirstComeFirstServed

MERGES = next(part for part in earlier.PARTS if part.exercises == ("bpe_merge",))
RIGHT = """
def bpe_merge(symbols, ranks):
    symbols = list(symbols)
    while len(symbols) > 1:
        best = min(range(len(symbols) - 1), key=lambda i: ranks.get((symbols[i], symbols[i + 1]), 10**9))
        if (symbols[best], symbols[best + 1]) not in ranks:
            break
        symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]
    return symbols
"""
WRONG = "def bpe_merge(symbols, ranks):\n    return list(symbols)"
STUB = "def bpe_merge(symbols, ranks):\n    # Your turn\n    raise NotSolvedYet('bpe_merge')"


def notebook(folder, name, *cells, exercises=()):
    """exercises: the numbers of the cells that are tagged as such."""
    made = [nbformat.v4.new_code_cell(cell) for cell in cells]
    for place in exercises:
        made[place].metadata.tags = ["exercise"]
    nbformat.write(nbformat.v4.new_notebook(cells=made), folder / name)


@pytest.fixture
def only_merges(monkeypatch):
    monkeypatch.setattr(earlier, "PARTS", (MERGES,))
    monkeypatch.setattr(earlier.interpret, "triton_here", lambda: "interpreted")


def whose(folder):
    found = earlier.written(folder=folder)
    (label, text), *more = found.whose.items()
    assert label == "tokenizer's merges (lesson 01)" and not more
    return found, text


def test_a_right_function_is_taken_and_runs_in_the_engine(tmp_path, only_merges):
    notebook(tmp_path, "01_tokenization.ipynb", "LIMIT = 1", STUB, RIGHT)
    found, text = whose(tmp_path)
    assert text == "yours" and list(found.parts) == ["bpe_merge"]
    with LLM(device="cpu", num_blocks=16) as llm:
        prompt, greedy = "Fenwick lies on the island of", SamplingParams(max_tokens=4, temperature=0)
        before = llm.generate(prompt, greedy)[0].token_ids
        with using(**found.parts) as used:
            assert llm.generate(prompt, greedy)[0].token_ids == before
    assert used.calls["bpe_merge"] > 0


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ([WRONG], "bpe_merge fails its check"),
        ([STUB], "bpe_merge is not solved yet"),
        ([RIGHT, STUB], "bpe_merge is not solved yet"),  # the later cell counts, as in the notebook
        (["x = 1"], "bpe_merge is not defined in 01_tokenization.ipynb; write it there, save, and run this cell again"),
        (
            [RIGHT.replace("(symbols, ranks)", "(symbols, ranks")],
            "bpe_merge is not defined in 01_tokenization.ipynb: its cell is not Python: '(' was never closed",
        ),
    ],
)
def test_what_is_wrong_or_missing_is_left_to_the_engine(tmp_path, only_merges, cells, problem):
    notebook(tmp_path, "01_tokenization.ipynb", *cells)
    found, text = whose(tmp_path)
    assert text.startswith(f"the engine's: {problem}") and found.parts == {}


@pytest.mark.parametrize("text", [None, "", "{}", "no JSON"])
def test_a_notebook_that_is_not_there_or_cannot_be_read(tmp_path, only_merges, text):
    if text is not None:
        (tmp_path / "01_tokenization.ipynb").write_text(text, encoding="utf-8")
    found, whom = whose(tmp_path)
    assert found.parts == {}
    if text is None:
        problem = "no 01_*.ipynb next to this notebook; copy yours here, and run this cell again"
    else:
        problem = (
            "01_tokenization.ipynb is not a notebook that can be read; save it again from Jupyter, or copy a backup"
        )
    assert whom.startswith(f"the engine's: {problem}")


def test_copies_of_a_notebook_do_not_count(tmp_path, only_merges):
    for name in ("01_tokenization-Copy1.ipynb", "01_tokenization.new.ipynb"):
        notebook(tmp_path, name, WRONG)
    notebook(tmp_path, "01_tokenization.ipynb", RIGHT)
    assert whose(tmp_path)[1] == "yours"


def test_without_triton_kernels_are_left_to_the_engine(tmp_path, monkeypatch):
    def missing():
        raise earlier.MissingPackage("no triton")

    monkeypatch.setattr(earlier.interpret, "triton_here", missing)
    found = earlier.written(folder=tmp_path)
    kernels = {text for what, text in found.whose.items() if what.startswith("kernel")}
    assert kernels == {"the engine's: triton does not run here"}


def test_the_quantizer_is_kept_apart(tmp_path, monkeypatch):
    part = earlier.Part("quantizer", "06", (), lambda names: {"gptq": names["gptq"]})
    monkeypatch.setattr(earlier, "PARTS", (part,))
    monkeypatch.setattr(earlier.interpret, "triton_here", lambda: "interpreted")
    notebook(tmp_path, "06_awq_and_gptq.ipynb", "def gptq(weight, factor, grid):\n    return 7")
    found = earlier.written(folder=tmp_path)
    assert found.parts == {} and found.quantizer["gptq"](None, None, None) == 7


def test_only_definitions_run():
    cells = ["import math\nprint(1 / 0)", "%timeit 1", "SIZE = 3\nlow = 4", "def f():\n    return SIZE", "BAD = 1 / 0"]
    names, errors = earlier.definitions(cells, "a lesson")
    assert {"math", "SIZE", "f"} <= names.keys() and not {"low", "BAD"} & names.keys()
    assert names["f"]() == 3 and errors["BAD"].startswith("ZeroDivisionError")


def test_of_an_exercises_cell_assignments_to_names_are_kept():
    cells = [
        "low = 4\na.b = 5",
        "low = 6",
        "one, (two, three) = 1, [2, 3]\nfour: int = 4\nfive: int\nlow += 1\nx[0] = 7",
    ]
    names, errors = earlier.definitions(cells, "a lesson", exercises={0, 2})
    assert [names[each] for each in ("low", "one", "two", "three", "four")] == [4, 1, 2, 3, 4]
    assert errors == {} and not {"five", "x"} & names.keys()


HELPED = "far = 10**9\n" + RIGHT.replace("10**9", "far")


def test_a_solution_may_use_a_variable_of_its_own_cell(tmp_path, only_merges):
    notebook(tmp_path, "01_tokenization.ipynb", HELPED, exercises=[0])
    assert whose(tmp_path)[1] == "yours"


def test_a_variable_that_was_not_read_is_named_with_the_way_out(tmp_path, only_merges):
    notebook(tmp_path, "01_tokenization.ipynb", *HELPED.split("\n", 1), exercises=[1])
    text = whose(tmp_path)[1]
    assert "bpe_merge fails its check (the example): it raised NameError: name 'far' is not defined" in text
    assert text.endswith("; move what it needs into the cell of the exercise")


def test_a_definition_that_failed_says_why(tmp_path, only_merges):
    notebook(tmp_path, "01_tokenization.ipynb", RIGHT.replace("symbols, ranks)", "symbols, ranks, far=far)"))
    text = whose(tmp_path)[1]
    said = "the engine's: bpe_merge is not defined in 01_tokenization.ipynb: NameError: name 'far' is not defined"
    assert text.startswith(said)


def test_another_exception_is_named_without_that_advice(tmp_path, only_merges):
    notebook(tmp_path, "01_tokenization.ipynb", "def bpe_merge(symbols, ranks):\n    return symbols.no_such_thing")
    text = whose(tmp_path)[1]
    assert "it raised AttributeError: 'list' object has no attribute" in text and "move" not in text


def test_a_solution_that_calls_a_stub_names_the_stub(tmp_path, only_merges):
    cells = ["def helper():\n    raise NotSolvedYet('helper')", "def bpe_merge(symbols, ranks):\n    return helper()"]
    notebook(tmp_path, "01_tokenization.ipynb", "from minillm.course import NotSolvedYet", *cells)
    assert whose(tmp_path)[1] == "the engine's: bpe_merge needs helper, which is not solved yet"


ORDER = """
class PatientShortest(FirstComeFirstServed):
    def __init__(self, patience=4.0):
        self.patience = patience

    def key(self, request):
        return len(request.prompt) + self.patience * request.arrival
"""
ORDER_STUB = "class PatientShortest(FirstComeFirstServed):\n    def key(self, r):\n        raise NotSolvedYet('key')"
SHARE = """
def share_budget(pending, budget):
    counts = np.zeros_like(pending)
    for row in np.argsort(pending > 1, kind="stable"):
        counts[row] = min(pending[row], budget)
        budget -= counts[row]
    return counts
"""
SHARE_STUB = "def share_budget(pending, budget):\n    raise NotSolvedYet('share_budget')"
IMPORTS = """
import numpy as np
from minillm.course import NotSolvedYet
from minillm.scheduler.policies import FirstComeFirstServed
"""


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("share", [True, False])
def test_the_engine_supplies_what_was_skipped_of_a_policy(tmp_path, monkeypatch, order, share):
    monkeypatch.setattr(earlier, "PARTS", [part for part in earlier.PARTS if part.lesson == "10"])
    monkeypatch.setattr(earlier.interpret, "triton_here", lambda: "interpreted")
    cells = [ORDER if order else ORDER_STUB, SHARE if share else SHARE_STUB]
    notebook(tmp_path, "10_inflight_batching.ipynb", IMPORTS, *cells)
    found = earlier.written(folder=tmp_path)
    assert list(found.whose.values()) == [
        "yours" if order else "the engine's: PatientShortest is not solved yet",
        "yours" if share else "the engine's: share_budget is not solved yet",
    ]
    if not (order or share):
        assert found.parts == {}
        return
    policy = found.parts["policy"]()
    engines = FirstComeFirstServed()
    asked = type("Asked", (), {"prompt": [1] * 10, "arrival": 3})
    assert policy.key(asked) == (22 if order else 3)
    assert (type(policy).share is not type(engines).share) == share
    pending = np.array([5, 1, 6], np.int32)
    assert policy.share(pending, 8).tolist() == engines.share(pending, 8).tolist()


ATTENTION = """
import torch

def batched_attention(q, k, v, lengths, scale):
    group = q.shape[1] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    unseen = torch.arange(k.shape[1], device=k.device) >= lengths[:, None]
    v = v.masked_fill(unseen[:, :, None, None], 0)
    scores = torch.einsum("rhd,rkhd->rhk", q, k) * scale
    weights = scores.masked_fill(unseen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("rhk,rkhd->rhd", weights, v)
"""


def test_the_attention_of_lesson_99_serves_and_a_kernel_takes_its_place(tmp_path, monkeypatch):
    kernel = earlier.Part("kernel", "99", (), lambda names: {"decode_attention": max}, needs_triton=True)
    mine = [part for part in earlier.PARTS if part.lesson == "99"]
    monkeypatch.setattr(earlier, "PARTS", [kernel, *mine])
    monkeypatch.setattr(earlier.interpret, "triton_here", lambda: "interpreted")
    notebook(tmp_path, "99_serve_and_benchmark.ipynb", ATTENTION)
    found = earlier.written(folder=tmp_path)
    assert found.parts == {"decode_attention": max} == found.kernels
    with LLM(device="cpu", num_blocks=32, dtype="float64") as llm:
        prompts, greedy = (
            ["Fenwick lies on", "Once upon a time there was a"],
            SamplingParams(max_tokens=6, temperature=0),
        )
        before = [each.token_ids for each in llm.generate(prompts, greedy)]
        with using(**found.plain) as used:
            assert [each.token_ids for each in llm.generate(prompts, greedy)] == before
    assert used.calls["decode_attention"] > 0


@pytest.mark.parametrize(
    ("current", "whose"),
    [
        ("right", "yours"),  # the saved notebook has a stub
        ("stub", "the engine's: batched_attention is not solved yet"),
        ("other", "yours"),  # the section was skipped today: what was saved counts
        (None, "yours"),
    ],
)
def test_what_the_current_notebook_has_defined_counts_not_what_was_saved(tmp_path, monkeypatch, current, whose):
    monkeypatch.setattr(earlier, "PARTS", [part for part in earlier.PARTS if part.lesson == "99"])
    monkeypatch.setattr(earlier.interpret, "triton_here", lambda: "interpreted")
    stub = "from minillm.course import NotSolvedYet\n\ndef batched_attention(*args):\n    raise NotSolvedYet('it')"
    names = {"right": ATTENTION, "stub": stub, "other": "x = 1"}
    notebook(tmp_path, "99_serve_and_benchmark.ipynb", stub if current == "right" else ATTENTION)
    defined = None
    if current is not None:
        defined = {}
        exec(names[current], defined)
    found = earlier.written(defined, tmp_path)
    assert list(found.whose.values()) == [whose]
    if current == "right":
        assert found.plain["decode_attention"].__closure__[0].cell_contents is defined
