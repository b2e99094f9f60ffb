"""Lesson 00: the generation loop, a step's work, the roofline, a norm of one's own."""

import math

import torch

from . import Exercise

continue_text = Exercise("continue_text")


def _counting(ids: list[int]) -> dict[int, float]:
    """A model that counts: the most likely token is the last one plus one; the others are close."""
    return {ids[-1] + 1: -0.1, ids[-1]: -2.0, 0: -3.0}


def _adding(ids: list[int]) -> dict[int, float]:
    """A model that uses all tokens before: the most likely token is their sum modulo 97."""
    return {(sum(ids) + 1) % 97: -0.2, sum(ids) % 97: -1.7}


@continue_text.example
def _(function):
    found = function(_counting, [4, 5], 3, 99)
    assert found == [6, 7, 8], f"counting on from [4, 5] for 3 tokens gives [6, 7, 8], not {found}"


@continue_text.property("each token sees everything before it", "ask the model about the prompt and all new tokens")
def _(function):
    found = function(_adding, [3, 10, 20], 4, 98)
    assert found == [34, 68, 39, 78], f"a model that adds up all it sees gives [34, 68, 39, 78], not {found}"


@continue_text.property(
    "it stops at the end token, which is no part of the text", "compare with `end` before appending"
)
def _(function):
    found = function(_counting, [4, 5], 10, 8)
    assert found == [6, 7], f"with 8 as the end, [4, 5] goes on as [6, 7], not {found}"


@continue_text.property("an end in the prompt ends nothing", "a chat's earlier turns end too: only a new token stops")
def _(function):
    found = function(_counting, [8, 4, 5], 2, 8)
    assert found == [6, 7], f"with 8 as the end, [8, 4, 5] goes on as [6, 7], not {found}"


@continue_text.property(
    "it takes the most likely token, whatever its place", "`max(found, key=found.get)`, not the first key"
)
def _(function):
    found = function(lambda ids: {1: -3.0, 2: -0.1, 3: -2.5}, [4], 2, 99)
    assert found == [2, 2], f"of {{1: -3.0, 2: -0.1, 3: -2.5}} the most likely is 2, but the result is {found}"


@continue_text.property("the given prompt is not changed", "work on a copy: `[*prompt, *new]`")
def _(function):
    prompt = [4, 5]
    function(_counting, prompt, 3, 99)
    assert prompt == [4, 5], f"the caller's prompt [4, 5] has become {prompt}"


step_work = Exercise("step_work")


@step_work.example
def _(function):
    assert tuple(function([(2, 3)], 1, 4)) == (24, 12)


@step_work.property("all matrices are counted", "sum over the shapes")
def _(function):
    found = tuple(function([(4, 5), (5, 6)], 1, 4))
    assert found == (200, 100), f"(4, 5) and (5, 6) hold 50 numbers: 200 bytes and 100 operations, not {found}"


@step_work.property("more tokens cost operations, not bytes", "a weight is read once, for however many tokens")
def _(function):
    found = tuple(function([(2, 3)], 10, 4))
    assert found[0] == 24, f"10 tokens read the same 24 bytes, not {found[0]}"


@step_work.property("every token is multiplied", "operations grow with the tokens")
def _(function):
    found = tuple(function([(2, 3)], 10, 4))
    assert found[1] == 120, f"10 tokens need 120 operations, not {found[1]}"


@step_work.property("smaller numbers are fewer bytes, not fewer operations", "only the bytes depend on the dtype")
def _(function):
    found = tuple(function([(2, 3)], 1, 2))
    assert found == (12, 12), f"in 2 bytes each, (2, 3) is 12 bytes and still 12 operations, not {found}"


floor_seconds = Exercise("floor_seconds")


@floor_seconds.example
def _(function):
    assert math.isclose(function(100, 0, 10, 1000), 10)


@floor_seconds.property("where arithmetic is the limit", "both must be done: the longer one decides")
def _(function):
    found = function(0, 50_000, 10, 1000)
    assert math.isclose(found, 50), f"50,000 operations at 1,000 a second take 50 s, not {found:g}"


@floor_seconds.property("reading and computing overlap", "the longer of the two, not their sum")
def _(function):
    found = function(100, 8000, 10, 1000)
    assert math.isclose(found, 10), f"10 s of reading hide 8 s of arithmetic: 10 s, not {found:g}"


@floor_seconds.property("fast machines have small floors", "divide by the rate; do not round")
def _(function):
    found = function(5e9, 0, 4e12, 8e14)
    assert math.isclose(found, 1.25e-3), f"5 GB at 4 TB/s take 1.25 ms, not {found * 1e3:g} ms"


rms_norm = Exercise("rms_norm")


def _right(x, weight, eps):
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _near(found, wanted, message):
    assert torch.allclose(found.double(), wanted, rtol=1e-3, atol=1e-5), message


@rms_norm.example
def _(function):
    found = function(torch.tensor([[3.0, -3.0, 3.0, -3.0]]), torch.ones(4), 1e-6)
    _near(found, torch.tensor([[1.0, -1.0, 1.0, -1.0]]).double(), f"1, -1, 1, -1 should come, not {found.tolist()}")


@rms_norm.property("every token on its own", "the mean runs over the last axis only: mean(-1, keepdim=True)")
def _(function):
    x = torch.tensor([[1.0, -1.0], [10.0, -10.0]])
    _near(function(x, torch.ones(2), 1e-6), _right(x, 1, 1e-6), "rows of different size must come out the same size")


@rms_norm.property("the mean itself is kept", "divide by the root of the mean square; subtract nothing")
def _(function):
    _near(function(torch.full((1, 8), 2.0), torch.ones(8), 1e-6), torch.ones(1, 8).double(), "twos must become ones")


@rms_norm.property("each column has its weight", "multiply the result by `weight`")
def _(function):
    x, weight = torch.tensor([[1.0, -1.0]]), torch.tensor([2.0, 0.5])
    _near(function(x, weight, 1e-6), _right(x, weight, 1e-6), "weights of 2 and 0.5 must give 2 and -0.5")


@rms_norm.property("eps is inside the root", "sqrt(mean + eps): it keeps a row of zeros from dividing by zero")
def _(function):
    x = torch.tensor([[0.1, -0.1]])
    _near(function(x, torch.ones(2), 1e-2), _right(x, 1, 1e-2), "0.1 / sqrt(0.01 + 0.01) is 0.7071")


@rms_norm.property("squares of half-precision numbers", "300 * 300 overflows float16: square x.float()")
def _(function):
    found = function(torch.tensor([[300.0, -300.0]], dtype=torch.float16), torch.ones(2), 1e-6)
    _near(found, torch.tensor([[1.0, -1.0]]).double(), f"300, -300 in float16 must become 1, -1, not {found.tolist()}")


@rms_norm.property("the dtype that came in goes out", "end with .to(x.dtype): the next matrix expects it")
def _(function):
    found = function(torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(4), 1e-6)
    assert found.dtype == torch.bfloat16, f"bfloat16 came in and {found.dtype} went out"
