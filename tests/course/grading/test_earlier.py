"""Lesson 99: what a learner wrote in earlier notebooks replaces parts of the engine, if it is right."""

import nbformat
import pytest

from minillm import LLM, SamplingParams, using
from minillm.course.grading import earlier

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


def notebook(folder, name, *cells):
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), folder / name)


@pytest.fixture
def only_merges(monkeypatch):
    monkeypatch.setattr(earlier, "PARTS", (MERGES,))
    monkeypatch.setattr(earlier.interpret, "triton_here", lambda: "interpreted")


def whose(folder):
    found = earlier.written(folder)
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
        (["x = 1"], "bpe_merge is not defined there"),
        ([RIGHT.replace("(symbols, ranks)", "(symbols, ranks")], "bpe_merge is not defined there"),  # not Python
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
    assert whom == "the engine's: no readable notebook of that lesson here" and found.parts == {}


def test_copies_of_a_notebook_do_not_count(tmp_path, only_merges):
    for name in ("01_tokenization-Copy1.ipynb", "01_tokenization.new.ipynb"):
        notebook(tmp_path, name, WRONG)
    notebook(tmp_path, "01_tokenization.ipynb", RIGHT)
    assert whose(tmp_path)[1] == "yours"


def test_without_triton_kernels_are_left_to_the_engine(tmp_path, monkeypatch):
    def missing():
        raise earlier.MissingPackage("no triton")

    monkeypatch.setattr(earlier.interpret, "triton_here", missing)
    found = earlier.written(tmp_path)
    kernels = {text for what, text in found.whose.items() if what.startswith("kernel")}
    assert kernels == {"the engine's: triton does not run here"}


def test_the_quantizer_is_kept_apart(tmp_path, monkeypatch):
    part = earlier.Part("quantizer", "06", (), lambda names: {"gptq": names["gptq"]})
    monkeypatch.setattr(earlier, "PARTS", (part,))
    monkeypatch.setattr(earlier.interpret, "triton_here", lambda: "interpreted")
    notebook(tmp_path, "06_awq_and_gptq.ipynb", "def gptq(weight, factor, grid):\n    return 7")
    found = earlier.written(tmp_path)
    assert found.parts == {} and found.quantizer["gptq"](None, None, None) == 7


def test_only_definitions_run():
    cells = ["import math\nprint(1 / 0)", "%timeit 1", "SIZE = 3\nlow = 4", "def f():\n    return SIZE", "BAD = 1 / 0"]
    names = earlier.definitions(cells, "a lesson")
    assert {"math", "SIZE", "f"} <= names.keys() and not {"low", "BAD"} & names.keys()
    assert names["f"]() == 3


def test_the_sharing_of_lesson_10_goes_into_its_policy():
    class Order:
        def key(self, request):
            return 0.0

    names = {"PatientShortest": Order, "share_budget": lambda pending, budget: [budget]}
    made = earlier._policy(names)["policy"]()
    assert made.share([1], 5) == [5] and made.key(None) == 0.0
