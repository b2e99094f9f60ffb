"""Each operator of tools/faults/mutations.py makes its fault, and leaves alone what is no code."""

import ast
from pathlib import Path

import pytest

from tools.faults import Fault
from tools.faults.mutations import mutations

ROOT = Path(__file__).resolve().parents[2]
CORE = ("minillm/scheduler/admission.py", "minillm/kv_cache/block_pool.py", "minillm/runner/sampler.py")
NO_CODE = '''"""A docstring: 1 < 2."""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 3

__all__ = ["f", "g"]
log = logging.getLogger(__name__)


@decorated(1)
class C(Base[2]):
    """One of 2."""

    x: dict[int, tuple[1, 2]]


def f(x: Literal[1]) -> Literal[True]:
    """At most 1 of them."""
    log.info("has %d", x + 1)
    assert x < 1 + x
    print(f"{x + 1} of {x - 1}", "not 2")
    raise ValueError(f"x is {x + 1}", x - 1) from x.error
'''


def made(code: str) -> list[str]:
    """What becomes of a piece of code."""
    return [fault.plant(code) for fault in mutations("piece.py", code, "tests")]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("a < b", ["a <= b", "a < b - 1", "True", "False"]),
        ("a >= b", ["a > b", "a >= b - 1"]),
        ("a == b", ["a != b"]),
        ("a is not None", ["a is None"]),
        ("a in b", ["a not in b"]),
        ("0 < a <= 1", ["0 <= a <= 1", "0 < a < 1", "0 < a", "a <= 1"]),
        ("a and b", ["a or b", "a", "b"]),
        ("a or b or c", ["a and b and c", "b or c", "a or c", "a or b"]),
        ("a + b", ["a - b", "a", "b"]),
        ("a * (b + c)", ["a / (b + c)", "a * b", "b + c"]),
        ("not a", ["a"]),
        ("-a", ["a"]),
        ("a + 7", ["a + 8", "a + 6"]),
        ("True", ["False"]),
        ("b if a else c", ["b if True else c", "b if False else c"]),
        ("[a for a in b if a.c]", ["[a for a in b if True]", "[a for a in b if False]"]),
        ("min(a, b)", ["max(a, b)", "a", "b"]),
        ("any(a)", ["all(a)", "a"]),
        ("np.where(a, b, c)", ["np.where(b, a, c)", "np.where(a, c, b)", "a", "b", "c"]),
        ("f(a, b)", ["f(a)", "f(b, a)", "a"]),
        ("f(a, b=c)", ["f(a)"]),
        ("a.copy()", ["a"]),
        ("a[b:c]", ["a[:c]", "a[b:]", "a"]),
        ("a, b", ["b, a"]),
        ("[a, b]", ["[a]", "[b]"]),
        ("{a: b, c: d}", ["{a: b}", "{c: d}"]),
    ],
)
def test_an_operator_changes_an_expression(code, expected):
    found = {ast.dump(ast.parse(each)) for each in made(f"x = {code}\n")}
    assert {ast.dump(ast.parse(f"x = {each}")) for each in expected} <= found


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("if a:\n    b()\n", ["if True:\n    b()\n", "if False:\n    b()\n"]),
        ("while a:\n    b()\n", ["while False:\n    b()\n", "while a:\n    pass\n"]),
        ("for a in b:\n    break\n", ["for a in b:\n    continue\n"]),
        ("a += b\n", ["a -= b\n", "a = b\n", "pass\n"]),
        ("a.b = c\n", ["pass\n"]),
        ("a = f(a)\n", ["pass\n", "a = a\n"]),
        ("del a[b]\n", ["pass\n"]),
        ("a.b(c)\n", ["pass\n"]),
        ("if a:\n    b()\n    raise E\n", ["if a:\n    b()\n    pass\n"]),
        ("try:\n    a()\nexcept (B, C):\n    pass\n", ["try:\n    a()\nexcept (B,):\n    pass\n"]),
    ],
)
def test_an_operator_changes_a_statement(code, expected):
    assert set(expected) <= set(made(code))


def test_no_name_is_left_undefined_and_no_loop_without_an_end():
    assert "pass" not in "".join(made("a = f(b)\n"))
    assert "True" not in "".join(made("while a:\n    b()\n"))


def test_what_is_no_code_stays():
    found = [fault.name for fault in mutations("piece.py", NO_CODE, "tests")]
    assert [name for name in found if "becomes pass" not in name and ":24" not in name] == []
    assert [name.split()[0] for name in found if "becomes pass" in name] == ["piece.py:24", "piece.py:25"]


def test_formats_of_texts_stay_in_statements_that_change():
    (first, *_) = made("a(f\"{b!r:>{c}} 'd'\", 1)\n")
    assert ast.dump(ast.parse(first)) == ast.dump(ast.parse("a(f\"{b!r:>{c}} 'd'\", 2)\n"))


def test_a_line_that_occurs_twice_is_changed_in_its_place():
    code = "é = '→'; a = b + c\nif é:\n    a = b + c\n"
    assert {code.replace("+", "-", 1), code[::-1].replace("+", "-", 1)[::-1]} <= set(made(code))


@pytest.mark.parametrize("file", CORE)
def test_each_mutation_is_code_that_differs(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    faults = mutations(file, text, "tests")
    assert faults == mutations(file, text, "tests")  # a seed draws the same ones again
    assert len(faults) > 100 and len({fault.name for fault in faults}) == len(faults)
    results = [ast.dump(ast.parse(fault.plant(text))) for fault in faults[::5]]
    assert ast.dump(ast.parse(text)) not in results and len(set(results)) == len(results)
    assert all(fault.name.startswith(f"{file}:") and fault.file == file for fault in faults)


def test_a_mutation_is_named_by_its_line_and_what_differs():
    (name,) = [fault.name for fault in mutations("a.py", "\nx = f(a, b, c < d)\n", "") if "<=" in fault.name]
    assert name == "a.py:2 c < d becomes c <= d"
    assert Fault("n", "a.py", "c < d", "c <= d", "").plant("c < d") == "c <= d"
