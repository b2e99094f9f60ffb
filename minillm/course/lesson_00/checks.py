"""Lesson 00: the generation loop, a step's work, the batch that is nearly free, RMSNorm."""

from collections import Counter
from numbers import Integral

import torch

from ..shared.checks import Exercise, assert_int, assert_list
from ..shared.differences import assert_near, text

SECONDS = 10  # for a property; a correct solution needs milliseconds

continue_text = Exercise("continue_text", seconds=SECONDS)


def _limited(model, max_tokens: int) -> tuple:
    """The model, and a list that gets an item with each call; a loop that never stops calling is stopped here."""
    calls: list[None] = []

    def limited(ids):
        calls.append(None)
        most = 4 * max_tokens + 4
        assert len(calls) <= most, f"asked for {max_tokens} new tokens, it called the model more than {most} times"
        return model(ids)

    return limited, calls


def _asked(model, function, prompt: list[int], max_tokens: int, end: int) -> list[int] | None:
    """Return what `function` returns, as a list: a property of its own checks that it is one."""
    found = function(_limited(model, max_tokens)[0], prompt, max_tokens, end)
    return found if found is None else list(found)


def _counting(ids: list[int]) -> dict[int, float]:
    """A model that counts: the most likely token is the last one plus one; the others are close."""
    return {ids[-1] + 1: -0.1, ids[-1]: -2.0, 0: -3.0}


def _alternating(ids: list[int]) -> dict[int, float]:
    """A model of two tokens, 4 and 5: the most likely one is the other of the two."""
    return {9 - ids[-1]: -0.1, ids[-1]: -2.0}


def _adding(ids: list[int]) -> dict[int, float]:
    """A model that uses all tokens before: the most likely token is their sum modulo 97."""
    return {(sum(ids) + 1) % 97: -0.2, sum(ids) % 97: -1.7}


@continue_text.example
def _(function):
    found = _asked(_counting, function, [4, 5], 3, 99)
    assert found == [6, 7, 8], f"expected [6, 7, 8], got {found}"


@continue_text.property(
    "each token sees everything before it", "the model knows only what you pass: the prompt and all new tokens"
)
def _(function):
    found = _asked(_adding, function, [3, 10, 20], 4, 98)
    assert found == [34, 68, 39, 78], f"with a model that adds up its input: expected [34, 68, 39, 78], got {found}"
    found = _asked(_adding, function, list(range(300)), 3, 1000)
    assert found == [37, 74, 51], f"the same with a prompt of 300 tokens: expected [37, 74, 51], got {found}"


@continue_text.property(
    "max_tokens new tokens if no end token comes",
    "0 is a valid limit; the prompt's length does not count; nothing but `end` stops the loop earlier",
)
def _(function):
    for prompt, most, wanted in (([4, 5], 0, []), ([4, 5], 1, [6]), ([1, 2, 3, 4, 5], 2, [6, 7])):
        found = _asked(_counting, function, prompt, most, 99)
        assert found == wanted, f"prompt {prompt}, max_tokens={most}: expected {wanted}, got {found}"
    found = _asked(lambda ids: {7: -0.1, 1: -2.0}, function, [4], 200, 99)
    got = found and (f"{len(found)} tokens" if set(found) == {7} else f"{found[:8]} and so on")
    assert found == [7] * 200, f"a model that always says 7, with max_tokens=200: expected 200 sevens, got {got}"
    found = _asked(_alternating, function, [4, 5], 5, 99)
    given = "a model that says 4 after 5 and 5 after 4, with [4, 5] and max_tokens=5"
    assert found == [4, 5, 4, 5, 4], f"{given}: expected [4, 5, 4, 5, 4], got {found}"


@continue_text.property(
    "it stops at the end token and leaves it out", "test for `end` before the token becomes part of the text"
)
def _(function):
    found = _asked(_counting, function, [4, 5], 10, 8)
    assert found == [6, 7], f"with end=8, [4, 5] continues as [6, 7]; got {found}"
    found = _asked(_counting, function, [0], 10, 4)
    assert found == [1, 2, 3], f"with end=4, [0] continues as [1, 2, 3]; got {found}"
    found = _asked(_counting, function, [7], 10, 8)
    assert found == [], f"with end=8, [7] continues as []: the first new token may be `end`, too; got {found}"
    found = _asked(_counting, function, [99_997], 4, int("100000"))  # an int of its own, not the model's object
    given = "with end=100000, [99997] continues as [99998, 99999]; got {} (equal ints may be two objects)"
    assert found == [99_998, 99_999], given.format(found)
    asked: Counter[tuple[int, ...]] = Counter()

    def counted(ids):
        asked[tuple(ids)] += 1
        return _counting(ids)

    _asked(counted, function, [4, 5], 10, 8)
    # Asking twice for a token has a property of its own.
    assert asked[4, 5, 6, 7] <= 2, (
        f"with end=8, [4, 5, 6, 7] was given to the model {asked[4, 5, 6, 7]} times: the end token ends the loop"
    )


@continue_text.property(
    "an end token in the prompt does not stop it", "earlier turns of a chat contain it too: look at the new token only"
)
def _(function):
    found = _asked(_counting, function, [8, 4, 5], 2, 8)
    assert found == [6, 7], f"with end=8, [8, 4, 5] continues as [6, 7]; got {found}"
    found = _asked(_counting, function, [4, 5, 8], 2, 8)
    assert found == [9, 10], f"with end=8, [4, 5, 8] continues as [9, 10]; got {found}"
    found = _asked(_counting, function, [8, 4, 5], 10, 8)  # an end token that is kept has a property of its own
    given = "with end=8 and max_tokens=10, [8, 4, 5] continues as [6, 7]: a new end token still ends it"
    assert found in ([6, 7], [6, 7, 8]), f"{given}; got {found}"


@continue_text.property(
    "it takes the most likely token, wherever it is in the dict", "compare the log-probabilities, not ids or positions"
)
def _(function):
    found = _asked(lambda ids: {1: -3.0, 2: -0.1, 3: -2.5}, function, [4], 2, 99)
    assert found == [2, 2], f"in {{1: -3.0, 2: -0.1, 3: -2.5}} the most likely token is 2; got {found}"
    nine = {**dict.fromkeys(range(10, 18), -5.0), 2: -0.1}
    for given in ({1: -300.0, 2: -200.0}, {1: -0.9, 2: -0.8}, {1: -0.69, 2: -0.68}, nine):
        found = _asked(lambda ids, given=given: dict(given), function, [4], 2, 99)
        assert found == [2, 2], f"in {given} the most likely token is 2; got {found}"


@continue_text.property("0 is a token id like any other", "`if token` is False for 0: compare with `end` instead")
def _(function):
    found = _asked(lambda ids: {0: -0.1, 1: -2.0}, function, [4], 2, 99)
    assert found == [0, 0], f"a model that always says 0: expected [0, 0], got {found}"
    found = _asked(lambda ids: {0: -0.1, 1: -2.0}, function, [4], 2, 0)
    assert found in ([], [0]), f"the same model with end=0 stops at once; got {found}"


@continue_text.property("the caller's prompt does not change", "appending to `prompt` appends to the caller's list")
def _(function):
    for end in (99, 8):  # an early return leaves the loop too
        prompt = [4, 5]
        _asked(_counting, function, prompt, 3, end)
        assert prompt == [4, 5], f"with end={end}: the caller's prompt [4, 5] is now {prompt}"


@continue_text.property(
    "one call of the model per token",
    "a call is a step of the engine: use all of its result, and stop at the end or the limit",
)
def _(function):
    for most, end, needed in ((10, 8, 3), (4, 99, 4)):
        model, calls = _limited(_counting, 10)
        list(function(model, [4, 5], most, end))
        given = f"[4, 5] with max_tokens={most} and end={end}"
        assert len(calls) <= needed, f"{given}: {needed} calls are enough; it made {len(calls)}"


@continue_text.property(
    "it returns a new list of ints", "the engine's own loop returns one, and a request's tokens belong to it alone"
)
def _(function):
    found = function(_counting, [4, 5], 3, 99)
    assert_list(found, "ints")
    kinds = {type(each).__name__ for each in found if not isinstance(each, Integral)}
    assert not kinds, f"expected ints in the list, got {', '.join(sorted(kinds))}"
    before = list(found)
    function(_counting, [20], 1, 99)
    assert found == before, f"a second call changed the result of the first from {before} to {found}"


step_work = Exercise("step_work", seconds=SECONDS)


def _pair(found) -> tuple:
    assert isinstance(found, (tuple, list)) and len(found) == 2, f"expected (bytes, operations), got {found!r}"
    return tuple(found)


@step_work.example
def _(function):
    found = _pair(function([(2, 3, 1)], 4))
    missing = {
        6: ": a multiplication and an addition are two operations",
        10: ": each sum starts at 0, so its first product is added, too",
        14: ": each product is added once, the first one to 0",
    }
    assert found == (24, 12), f"expected (24, 12), got {found}{missing.get(found[1], '')}"


# The properties below compare two results, so that a forgotten factor fails the example alone.
@step_work.property("every matrix counts", "add up over the list; layers have matrices of equal shapes")
def _(function):
    one, two = _pair(function([A], 4)), _pair(function([A, A], 4))
    assert two == (2 * one[0], 2 * one[1]), f"one matrix gives {one}; two of the same shape give {two}"
    matrices = [B, A]
    function(matrices, 4)
    assert matrices == [B, A], f"the caller's list has changed: it is now {matrices}"
    both, first, second = (_pair(function(list(each), 4)) for each in ([A, B], [A], [B]))
    wanted = first[0] + second[0], first[1] + second[1]
    assert both == wanted, f"one matrix gives {first}, another {second}, so both give {wanted}; got {both}"


@step_work.property("more tokens: the same bytes", "all tokens of a step share one reading of the weights")
def _(function):
    one, ten = (_pair(function([(2, 3, tokens)], 4))[0] for tokens in (1, 10))
    assert ten == one, f"one token reads {one} bytes, so ten read {one} bytes; got {ten}"


@step_work.property("more tokens: more operations", "each token has numbers of its own to multiply")
def _(function):
    one = _pair(function([(2, 3, 1)], 4))[1]
    for tokens in (10, 3000):
        wanted, many = tokens * one, _pair(function([(2, 3, tokens)], 4))[1]
        assert many == wanted, f"one token takes {one} operations, {tokens} take {wanted}; got {many}"


@step_work.property(
    "large counts are exact",
    "int32 ends at 2,147,483,647, and float32 rounds whole numbers above 16,777,216: count in Python's own ints",
)
def _(function):
    for rows, columns in ((256_000, 20_480), (4099, 4099)):
        one, all_rows = (_pair(function([(each, columns, 1)], 4)) for each in (1, rows))
        wanted = one[0] * rows, one[1] * rows
        given = f"{columns:,} columns: one row gives {one}, so {rows:,} rows give {wanted}"
        assert all_rows == wanted, f"{given}; got {all_rows}"
    for what, count in zip(("bytes", "operations"), _pair(function([A], 4)), strict=True):
        assert_int(count, f"the {what} of {[A]}")


@step_work.property("each matrix has its own number of tokens", "the third number belongs to its matrix alone")
def _(function):
    apart = [_pair(function([each], 4))[1] for each in (A, MANY)]
    for order in ([A, MANY], [MANY, A]):
        found = _pair(function(list(order), 4))[1]
        assert found == sum(apart), f"{order}: expected {sum(apart)} operations, got {found}"


@step_work.property("a matrix without tokens is not read", "0 tokens: neither bytes nor operations")
def _(function):
    without = _pair(function([A], 4))
    for matrices in ([A, (7, 5, 0)], [(7, 5, 0), A]):
        found = _pair(function(list(matrices), 4))
        assert found == without, f"{[A]} gives {without}, and {matrices} must give the same; got {found}"
    assert _pair(function([(7, 5, 0)], 4)) == (0, 0), "a step without tokens has no work: expected (0, 0)"


@step_work.property("smaller numbers: fewer bytes, as many operations", "count operations from the numbers, not bytes")
def _(function):
    wide = _pair(function([A, MANY], 4))
    for size in (2, 1):
        wanted, found = (wide[0] * size // 4, wide[1]), _pair(function([A, MANY], size))
        assert found == wanted, f"4 bytes per number give {wide}, so {size} give {wanted}; got {found}"


A, B, MANY = (4, 5, 1), (5, 6, 1), (3, 8, 400)


free_batch = Exercise("free_batch", seconds=SECONDS)


@free_batch.example
def _(function):
    found = function(1, 4, 8, 64)
    missing = ": each number is multiplied and added, two operations per token" if found == 32 else ""
    missing = ": 16 tokens take exactly as long as the reading, which is still free" if found == 15 else missing
    assert found == 16, f"expected 16, got {found}{missing}"


def _equal(found, wanted, given: str) -> None:
    assert found == wanted, f"{given}: expected {wanted}, got {found}"


@free_batch.property(
    "a larger model has the same free batch", "a larger model takes longer to read and longer to compute: divide"
)
def _(function):
    small = function(1, 4, 8, 64)
    assert small is not None, "1 number: expected an int, got None"
    for numbers in (3, 256, 10**9):
        _equal(function(numbers, 4, 8, 64), small, f"{numbers:,} numbers instead of 1")


@free_batch.property("smaller numbers, smaller batch", "half the bytes are read in half the time")
def _(function):
    wide = function(1, 4, 8, 64)
    _equal(function(1, 2, 8, 64), wide // 2, "2 bytes per number instead of 4")
    _equal(function(1, 1, 8, 64), wide // 4, "1 byte per number instead of 4")


@free_batch.property("only whole tokens", "round down: a token that fits only in part is not free")
def _(function):
    _equal(function(1, 4, 8, 31), 7, "31 operations a second: 0.5 s of reading, 0.0645 s a token")
    _equal(function(1, 4, 4.2e12, 7.66e14), 364, "4 bytes per number, 4.2 TB/s and 766 T operations/s")
    given = "31 operations and 2.5 bytes a second: 1.6 s of reading, 0.0645 s a token"
    _equal(function(1, 4, 2.5, 31), 24, given)
    assert_int(function(1, 4, 2.5, 31), given)


@free_batch.property(
    "fast arithmetic leaves room for many", "there is no largest answer: search until a token costs time"
)
def _(function):
    for tokens in (512, 10_001):
        rate = 4 * tokens + 1  # a quarter of a token is left over: rounding errors decide nothing
        found = function(1, 4, 8, rate)
        if found != tokens + 1:  # rounding up has a property of its own
            _equal(found, tokens, f"{rate:,} operations a second: 0.5 s of reading, {2 / rate:.2g} s a token")


@free_batch.property("slow arithmetic leaves no room", "0 is an answer: one token may already take longer than reading")
def _(function):
    _equal(function(1, 4, 8, 1), 0, "1 operation a second: 0.5 s of reading, 2 s a token")


rms_norm = Exercise("rms_norm", seconds=SECONDS)


def _right(x, weight, eps):
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _near(found, wanted, given: str) -> None:
    assert isinstance(found, torch.Tensor), f"expected a tensor, got {type(found).__name__}"
    assert found.shape == wanted.shape, f"expected the shape {tuple(wanted.shape)}, got {tuple(found.shape)}"
    assert_near(found, wanted, given, relative=1e-3, absolute=1e-5)


@rms_norm.example
def _(function):
    found = function(torch.tensor([[3.0, -3.0, 3.0, -3.0]]), torch.ones(4), 1e-6)
    _near(found, torch.tensor([[1.0, -1.0, 1.0, -1.0]]), "[3, -3, 3, -3]")


@rms_norm.property(
    "each token on its own",
    "the root of the mean of the squares, over the last axis only; keep that axis for the division",
)
def _(function):
    x = torch.tensor([[1.0, -1.0], [10.0, -10.0]])
    _near(function(x.clone(), torch.ones(2), 1e-6), _right(x, 1, 1e-6), "rows of different size become equally large")
    x = torch.tensor([[1.0, -1.0, 0.0], [10.0, -10.0, 0.0], [2.0, -4.0, 2.0]])
    _near(function(x.clone(), torch.ones(3), 1e-6), _right(x, 1, 1e-6), "three tokens of three numbers")
    x = torch.randn(70, 150, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, -x], dim=1)  # the mean of a row is 0: LayerNorm has a property of its own
    _near(function(x.clone(), torch.ones(300), 1e-6), _right(x, 1, 1e-6), "70 tokens of 300 numbers")


@rms_norm.property("the row's mean is not subtracted", "that would be LayerNorm: RMSNorm only divides")
def _(function):
    _near(function(torch.full((1, 8), 2.0), torch.ones(8), 1e-6), torch.ones(1, 8), "a row of twos")


@rms_norm.property(
    "each column has its weight", "the weights scale the normalized row, with all of their digits, and come last"
)
def _(function):
    x, weight = torch.tensor([[1.0, -1.0]]), torch.tensor([2.0, -0.5])
    _near(function(x.clone(), weight.clone(), 1e-6), _right(x, weight, 1e-6), "weights 2 and -0.5")
    # Whole numbers: a result that is rounded to 16 bits, which has a property of its own, stays the same.
    x, root = torch.tensor([[3.0, -3.0, 4.0, -4.0]]), 12.5**0.5
    found = function(x.clone(), torch.full((4,), root), 1e-6)
    given = f"the row {x.tolist()[0]} with weights of {root:.7f}, its root mean square, stays as it is"
    assert_near(found, x, given, relative=1e-5, absolute=0)


@rms_norm.property("eps is inside the root", "it is added to the mean, before the root")
def _(function):
    x = torch.tensor([[0.1, -0.1]])
    _near(function(x.clone(), torch.ones(2), 1e-2), _right(x, 1, 1e-2), "0.1, -0.1 with eps=0.01")
    _near(function(torch.zeros(1, 2), torch.ones(2), 1e-6), torch.zeros(1, 2), "a row of zeros")


@rms_norm.property("squares of half-precision numbers", "300 * 300 is too large for float16: widen before squaring")
def _(function):
    found = function(torch.tensor([[300.0, -300.0]], dtype=torch.float16), torch.ones(2), 1e-6)
    _near(found, torch.tensor([[1.0, -1.0]]), "300, -300 in float16")
    found = function(torch.tensor([[7e4, -7e4]]), torch.ones(2), 1e-6)
    _near(found, torch.tensor([[1.0, -1.0]]), "70,000 and -70,000 in float32, too large for float16")
    for row, dtype in (([3e4, 3e3, -3e3, -3e4], torch.float16), ([7e4, 7e3, -7e3, -7e4], torch.float32)):
        x = torch.tensor([row], dtype=dtype)
        _near(function(x.clone(), torch.ones(4), 1e-6), _right(x, 1, 1e-6), f"the row {row} in {dtype}")


@rms_norm.property(
    "the dtype that came in goes out", "float32 is for the computation; the next matrix expects x's dtype"
)
def _(function):
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        found = function(torch.ones(1, 4, dtype=dtype), torch.ones(4), 1e-6)
        assert found.dtype == dtype, f"{dtype} came in and {found.dtype} went out"
    found = function(torch.randn(1, 64, generator=torch.Generator().manual_seed(0)), torch.ones(64), 1e-6)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = torch.equal(found, found.to(dtype).float())
        assert not rounded, f"a row of float32 numbers came back rounded to the digits of {dtype}"


@rms_norm.property(
    "16-bit inputs: float32 inside, rounded once", "round after multiplying by the weight, and nothing before that"
)
def _(function):
    row = [1.75, -1.0, -1.5, 2.0]
    x, weight = torch.tensor([row], dtype=torch.bfloat16), torch.full((4,), 1.003)
    # Compared with its own result for float32: other mistakes change both.
    found, wide = function(x.clone(), weight.clone(), 1e-6), function(x.float(), weight.clone(), 1e-6)
    assert isinstance(found, torch.Tensor), f"expected a tensor, got {type(found).__name__}"
    given = f"the row {row} with weights of 1.003 gives {text(wide)} in float32; in bfloat16"
    assert_near(found.bfloat16(), wide.bfloat16(), given, relative=1e-3, absolute=1e-8)


@rms_norm.property(
    "x and the weights do not change", "x.float() is x itself if x is float32: avoid in-place operations"
)
def _(function):
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 0.5])
    found = function(x, weight, 1e-6)
    assert x.tolist() == [[3.0, 4.0]], f"the caller's x [[3.0, 4.0]] is now {x.tolist()}"
    assert weight.tolist() == [2.0, 0.5], f"the caller's weight [2.0, 0.5] is now {weight.tolist()}"
    assert found.data_ptr() != x.data_ptr(), "the result lies in the memory of x"
    before = found.clone()
    function(torch.tensor([[5.0, -12.0]]), weight, 1e-6)
    assert torch.equal(found, before), "a second call changed the result of the first: return a new tensor each time"
