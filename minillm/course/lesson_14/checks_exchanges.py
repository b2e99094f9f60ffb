"""Sums over ranks, and the largest logit of a divided vocabulary.  Lesson 14."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..shared.checks import Exercise, Explained, a_type
from .ranks import together

SECONDS = 10  # of CPU time for one property: correct solutions take milliseconds

# ---- a sum over ranks

all_reduce = Exercise("all_reduce", seconds=SECONDS)
DRAWS = 6  # of each shape: a sum of few numbers may be the same in two orders
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-10}  # more than the order of a few numbers changes their sum


def _sums(function, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return what each rank returns, if it is a sum."""
    ran = together(function, [each.clone() for each in parts])
    for rank, found in enumerate(ran.results):
        if not isinstance(found, Tensor):
            raise Explained(f"rank {rank} of {len(parts)} returned {a_type(found)}: expected a tensor")
        assert found.shape == parts[0].shape, f"x is {list(parts[0].shape)}, and the sum {list(found.shape)}"
    assert not ran.unread, f"{len(parts)} ranks: {ran.unread} messages were sent that no rank has received"
    return ran.results


def _drawn(size: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + size)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]


def _in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for each in parts[1:]:
        total += each
    return total


def _adds_all(function, size: int = 4) -> bool:
    """Return whether numbers that need no rounding are added right on all ranks: "any number of ranks" says it."""
    parts = [torch.tensor([10.0**rank]) for rank in range(size)]
    try:
        return all(torch.equal(each, _in_order(parts)) for each in _sums(function, parts))
    except AssertionError:
        return False


def _are_sums(found: Sequence[Tensor], parts: Sequence[Tensor]) -> bool:
    """Return whether every rank has the sum of all parts, added in whichever order."""
    wanted = _in_order(parts)
    return all(bool((each - wanted).abs().max() < ROUNDING[wanted.dtype]) for each in found)


def _are_alike(found: Sequence[Tensor]) -> bool:
    return all(torch.equal(each, found[0]) for each in found)


@all_reduce.example
def _(function):
    found = _sums(function, [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])])
    for rank, each in enumerate(found):
        assert each.tolist() == [11, 22], f"ranks with [1, 2] and [10, 20]: rank {rank} has {each.tolist()}"


@all_reduce.property(
    "any number of ranks",
    "size may be 3, 4 or 5: each rank needs the x of every other one, and every `exchange` has its counterpart",
)
def _(function):
    for size in (3, 4, 5):
        for numbers in (1, 2):
            parts = [torch.tensor([10.0**rank, 1.0][:numbers]) for rank in range(size)]
            for rank, found in enumerate(_sums(function, parts)):
                wanted = _in_order(parts).tolist()
                assert found.tolist() == wanted, f"rank {rank} of {size}: expected {wanted}, got {found.tolist()}"


@all_reduce.property(
    "all ranks have the same bits",
    "in floating point, a + b + c depends on the order: all ranks must add in the same one",
)
def _(function):
    if not _adds_all(function):
        return
    found = _sums(function, [torch.tensor([each]) for each in (1.0, 2.0**30, -(2.0**30), 1.0)])
    values = [each.item() for each in found]
    assert _are_alike(found), f"ranks with 1, 2**30, -2**30 and 1, in float32: they have {values}"
    for dtype in (torch.float32, torch.float64):
        for seed in range(3):
            parts = _drawn(4, 303, dtype=dtype, seed=seed)  # 4 does not divide 303: three numbers are in no quarter
            found = _sums(function, parts)
            if not _are_sums(found, parts):
                return  # "any shape" says what is not added, and the property of dtypes what is lost
            assert _are_alike(found), f"4 ranks, 303 random numbers in {dtype}: some sums differ between ranks"


@all_reduce.property(
    "added in the order of ranks, wherever in x an element is",
    "begin with rank 0's x. If parts of x differ in their order, a row's sum depends on its place in the batch",
)
def _(function):
    if not _adds_all(function):
        return
    for dtype in (torch.float32, torch.float64):
        for shape in ((40, 8), (8,), (3, 107)):  # `sum` of a stack adds small tensors, and a row's end, otherwise
            for seed in range(DRAWS):
                parts = _drawn(5, *shape, dtype=dtype, seed=seed)
                found = _sums(function, parts)
                if not _are_alike(found):
                    return  # what differs between ranks is another property's matter
                _expect_in_order(found[0], parts)


def _expect_in_order(found: Tensor, parts: Sequence[Tensor]) -> None:
    wanted = _in_order(parts)
    if torch.equal(found, _in_order([each.double() for each in parts]).to(found.dtype)):
        return  # a wider dtype is as good
    if (found - wanted).abs().max() > ROUNDING[wanted.dtype]:
        return  # what loses digits is another property's matter
    wrong = int((found != wanted).sum())
    assert wrong == 0, (
        f"5 ranks, x is {list(wanted.shape)} {wanted.dtype}: {wrong} of {wanted.numel()} sums differ from "
        "((((x0 + x1) + x2) + x3) + x4)"
    )


@all_reduce.property(
    "numbers of 16 bits are added in float32",
    "bfloat16 has 8 significant bits and float16 has 11: 256 + 1 is 256, or 2048 + 1 is 2048. Convert before the sum, "
    "and back after it",
)
def _(function):
    if not _adds_all(function):
        return
    for dtype, first in ((torch.bfloat16, 256), (torch.float16, 2048)):
        for count in (1, 8):
            parts = [torch.full((count,), each, dtype=dtype) for each in (first, 1, 1, 2)]
            for found in _sums(function, parts):
                wrong = found[found != first + 4]
                assert not len(wrong), (
                    f"ranks with {first}, 1, 1 and 2, in {dtype}: expected {first + 4}, got {float(wrong[0]):.0f}"
                )


@all_reduce.property(
    "the sum has the dtype of x, and float64 loses nothing",
    "torch.promote_types(x.dtype, torch.float32) is the dtype to add in",
)
def _(function):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        (found, *_) = _sums(function, [torch.ones(2, dtype=dtype)] * 2)
        assert found.dtype == dtype, f"x is {dtype}, and the sum {found.dtype}"
    for count in (1, 4):
        parts = [torch.full((count,), each, dtype=torch.float64) for each in (1 + 2.0**-40, 2.0**-40)]
        for found in _sums(function, parts):
            assert bool((found == 1 + 2.0**-39).all()), (
                "ranks with 1 + 2**-40 and 2**-40, in float64: the small numbers are lost"
            )


@all_reduce.property(
    "any shape",
    "x may have one dimension or three, be a view, and have a number of elements that size does not divide; exchange "
    "it as it is",
)
def _(function):
    for shape in ((1,), (3, 4), (2, 3, 4)):
        parts = [torch.full(shape, float(rank + 1)) for rank in range(2)]
        assert torch.equal(_sums(function, parts)[1], torch.full(shape, 3.0)), f"x of {list(shape)}"
    views = [each.T for each in _drawn(2, 4, 6)]
    assert torch.equal(_sums(function, views)[0], views[0] + views[1]), "x is a transposed view"
    for size, shape in ((3, (5, 7)), (4, (303,)), (5, (3, 107))):  # size does not divide the number of elements
        if _adds_all(function, size):
            parts = _drawn(size, *shape)
            assert _are_sums(_sums(function, parts), parts), (
                f"{size} ranks, x of {list(shape)}: some elements are wrong"
            )


# ---- the largest logit of a divided vocabulary

sharded_argmax = Exercise("sharded_argmax", seconds=SECONDS)
FEW = 8  # numbers a row that a rank may send to each other rank


def _largest(function, logits: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return what each rank returns, if it is a largest logit and a token."""
    ran = together(function, [each.clone() for each in logits.chunk(size, -1)])
    for found in ran.results:
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise Explained(f"expected (largest, token), got {a_type(found)}")
        largest, token = found
        if not (isinstance(largest, Tensor) and isinstance(token, Tensor)):
            raise Explained(f"expected two tensors, got {a_type(largest)} and {a_type(token)}")
        if largest.dtype == torch.int64 and token.is_floating_point():
            raise Explained("expected (largest, token), in this order: the first result is int64, like tokens")
        rows = (len(logits),)
        assert largest.shape == token.shape == rows, (
            f"{len(logits)} rows: both results are [{len(logits)}], not {list(largest.shape)} and {list(token.shape)}"
        )
        if token.dtype != torch.int64:
            raise Explained(f"tokens are int64, not {token.dtype}: `.long()` converts them")
    return ran.results


def _expect_tokens(function, logits: Tensor, size: int) -> None:
    wanted = logits.argmax(-1)
    for rank, (largest, token) in enumerate(_largest(function, logits, size)):
        if not torch.equal(token, wanted):
            row = int((token != wanted).nonzero()[0])
            raise AssertionError(
                f"{size} ranks with {logits.shape[1] // size} tokens each, row {row}: rank {rank} found token "
                f"{int(token[row])}, and the largest logit is token {int(wanted[row])}'s"
            )
        assert torch.equal(largest.float(), logits.amax(-1).float()), f"rank {rank} of {size}: `largest` is wrong"


@sharded_argmax.example
def _(function):
    _expect_tokens(function, torch.tensor([[1.0, 5.0, 2.0, 3.0]]), 2)


@sharded_argmax.property(
    "tokens count from the first rank's first one",
    "a rank's column i is token rank * columns + i",
)
def _(function):
    _expect_tokens(function, torch.tensor([[1.0, 5.0, 2.0, 9.0]]), 2)
    _expect_tokens(function, torch.tensor([[1.0, 5.0, 2.0, 4.0, 9.0, 7.0]]), 2)
    _expect_tokens(function, _drawn(3, 1, 64)[0], 2)


@sharded_argmax.property("any number of ranks", "size may be 3 or 4, and the largest logit any of them's")
def _(function):
    if _counts_from_rank_0(function):
        for size in (3, 4):
            for column in range(12):
                logits = torch.zeros(1, 12)
                logits[0, column] = 1
                _expect_tokens(function, logits, size)


def _counts_from_rank_0(function) -> bool:
    """Return whether tokens are right on two ranks: if not, that is another property's matter."""
    logits = torch.tensor([[1.0, 5.0, 2.0, 4.0, 9.0, 7.0]])
    return bool(_largest(function, logits, 2)[0][1].item() == 4)


@sharded_argmax.property("each row has its own answer", "reduce over the last dimension alone, and keep the rows apart")
def _(function):
    if _counts_from_rank_0(function):
        _expect_tokens(function, torch.tensor([[9.0, 1.0, 0.0, 0.0], [0.0, 2.0, 8.0, 0.0], [0.0, 7.0, 1.0, 1.0]]), 2)
        _expect_tokens(function, _drawn(5, 16, 12)[0], 2)


@sharded_argmax.property(
    "of equal logits, the first token's is taken",
    "one device takes the lowest token id; the ranks must agree with it",
)
def _(function):
    _expect_tokens(function, torch.tensor([[1.0, 5.0, 5.0, 0.0]]), 2)
    _expect_tokens(function, torch.tensor([[5.0, 5.0, 1.0, 0.0]]), 2)
    _expect_tokens(function, torch.full((1, 6), 2.0), 2)


@sharded_argmax.property(
    "logits may all be negative",
    "neither 0 nor any other number is a lower bound of logits: begin with the first one, or with -inf",
)
def _(function):
    logits = torch.tensor([[-4.0, -1.0, -5.0, -3.0]])
    for scale in (1.0, 1e5, 1e30):
        _expect_tokens(function, scale * logits, 2)


@sharded_argmax.property(
    "token ids stay exact, however large",
    "gather ids in a dtype that holds them: bfloat16 is exact up to 256, float16 up to 2,048, int16 up to 32,767",
)
def _(function):
    if not _counts_from_rank_0(function):
        return
    for vocab, token in ((3000, 2051), (40_000, 39_999), (256_000, 255_999)):
        logits = torch.zeros(1, vocab)
        logits[0, token] = 1
        _expect_tokens(function, logits, 2)


@sharded_argmax.property(
    "logits of float64 are compared in float64",
    "logits may be wider than float32: do not convert them to less before they are compared, here or after the gather",
)
def _(function):
    if not _counts_from_rank_0(function):
        return
    low, high = 1.0, 1.0 + 1e-9
    for row in ([low, high, 0, 0], [0, low, 0, high]):  # in one rank, and in two
        _expect_tokens(function, torch.tensor([row], dtype=torch.float64), 2)


@sharded_argmax.property(
    "the ranks tell each other a few numbers a row",
    "find the largest of the rank's own logits first, and gather what was found",
)
def _(function):
    logits, size = _drawn(1, 4, 3000)[0], 3
    ran = together(function, list(logits.chunk(size, -1)))
    most = max(each.sent for each in ran.ranks) // (len(logits) * (size - 1))
    assert most <= FEW, f"with 1000 tokens each, a rank sends {most} numbers a row to each other rank"
