"""Check the parts of a matrix that ranks hold, and the times at which the stages of a pipeline run.  Lesson 14."""

from collections.abc import Sequence

from ..shared.checks import Exercise, Explained, a_type
from .dividing import timeline as timeline_here

SECONDS = 5  # of CPU time for one property: correct solutions take milliseconds

# ---- which rows and columns a rank holds

shard = Exercise("shard", seconds=SECONDS)


def _held(function, name: str, out: int, inputs: int, parts: int, rank: int, size: int) -> tuple[range, range]:
    call = f"shard({name!r}, {out}, {inputs}, {parts}, {rank}, {size})"
    got = function(name, out, inputs, parts, rank, size)
    assert isinstance(got, tuple | list) and len(got) == 2, f"{call}: expected (rows, columns), got {got!r}"
    assert all(isinstance(each, range) for each in got), f"{call}: rows and columns are ranges, not {got!r}"
    return got[0], got[1]


def _expect(
    function, name: str, out: int, inputs: int, parts: int, rank: int, size: int, rows: range, columns: range
) -> None:
    got = _held(function, name, out, inputs, parts, rank, size)
    call = f"shard({name!r}, {out}, {inputs}, {parts}, {rank}, {size})"
    assert tuple(got) == (rows, columns), f"{call}: expected ({rows}, {columns}), got ({got[0]}, {got[1]})"


# each matrix with the sizes of its rows and columns, and its number of parts
BY_ROWS = {
    "q_proj": (24, 18, 4),
    "k_proj": (12, 18, 2),
    "v_proj": (12, 18, 2),
    "gate_proj": (24, 18, 24),
    "up_proj": (24, 18, 24),
    "embed_tokens": (24, 18, 24),
    "lm_head": (24, 18, 24),
}
BY_COLUMNS = {"o_proj": (18, 24, 4), "down_proj": (18, 24, 24)}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def _expect_half(function, name: str) -> None:
    """The first of two ranks holds the first half of the right side."""
    out, inputs, parts = (BY_ROWS | BY_COLUMNS)[name]
    rows, columns = (range(out // 2), range(inputs)) if name in BY_ROWS else (range(out), range(inputs // 2))
    _expect(function, name, out, inputs, parts, 0, 2, rows, columns)


def _expect_whole_in_order(function, name: str) -> None:
    """The parts of 2, 3 and 6 ranks, one after the other, are 0 to 23."""
    out, inputs = (24, 10) if name in BY_ROWS else (10, 24)
    parts, side = 6 if name in ATTENTION else 24, int(name in BY_COLUMNS)
    for size in (2, 3, 6):
        found = [i for rank in range(size) for i in _held(function, name, out, inputs, parts, rank, size)[side]]
        assert found == list(range(24)), (
            f"{name} with {parts} parts: the {('rows', 'columns')[side]} of all {size} ranks, one after the other, "
            "are not 0 to 23"
        )


def _holds(expectation, function, name: str) -> bool:
    """Return whether a matrix is as expected: if not, that is another property's matter."""
    try:
        expectation(function, name)
    except AssertionError:
        return False
    return True


@shard.example
def _(function):
    _expect(function, "gate_proj", 8, 6, 8, 1, 2, range(4, 8), range(6))
    _expect(function, "o_proj", 6, 8, 4, 1, 2, range(6), range(4, 8))


@shard.property(
    "matrices whose outputs stay with the rank are divided by rows",
    "heads and inner values stay with their rank, and so do the tokens of a vocabulary: its matrices have their rows",
)
def _(function):
    for name in BY_ROWS:
        _expect_half(function, name)


@shard.property(
    "matrices whose inputs are divided already are divided by columns",
    "attention's result and the inner values are divided between the ranks: which two matrices read them?",
)
def _(function):
    for name in BY_COLUMNS:
        _expect_half(function, name)


@shard.property(
    "in the order of ranks, the parts are the whole",
    "rank 0 has the first part, and each of the others begins where the one before ends",
)
def _(function):
    for name in BY_ROWS | BY_COLUMNS:
        if _holds(_expect_half, function, name):
            _expect_whole_in_order(function, name)


@shard.property(
    "a part stays whole where there are fewer than ranks",
    "then size / parts neighbors hold the same part, since the query heads that read it are theirs",
)
def _(function):
    for rank, rows in enumerate((range(8), range(8), range(8, 16), range(8, 16))):
        _expect(function, "k_proj", 16, 10, 2, rank, 4, rows, range(10))
    for parts, size in ((1, 3), (2, 6), (4, 8)):
        for rank in range(size):
            first = 3 * (rank // (size // parts))
            for name in ("k_proj", "v_proj"):
                _expect(function, name, 3 * parts, 10, parts, rank, size, range(first, first + 3), range(10))


@shard.property("a single rank holds all", "size may be 1: lessons with one process load the model with the same rule")
def _(function):
    for name in BY_ROWS | BY_COLUMNS:
        if _holds(_expect_half, function, name) and _holds(_expect_whole_in_order, function, name):
            _expect(function, name, 12, 12, 4 if name in ATTENTION else 12, 0, 1, range(12), range(12))


# ---- when the stages of a pipeline run

timeline = Exercise("timeline", seconds=SECONDS)

Begin = Sequence[Sequence[Sequence[float]]]


def _begin(function, stage_ms: Sequence[float], batches: int, steps: int) -> list[list[list[float]]]:
    given = list(stage_ms)
    got = function(given, batches, steps)
    assert given == list(stage_ms), "`stage_ms` has changed: work on a copy"
    shape = f"begin[step][batch][stage] is a list of {steps} lists of {batches} lists of {len(stage_ms)} numbers"
    _expect_list(got, steps, shape)
    for step in got:
        _expect_list(step, batches, shape)
        for row in step:
            _expect_list(row, len(stage_ms), shape)
    return got


def _expect_list(got: object, length: int, shape: str) -> None:
    if not isinstance(got, list):
        raise Explained(f"{shape}: got {a_type(got)}")
    assert len(got) == length, f"{shape}: got a list of {len(got)} where one of {length} belongs"


def _expect_times(function, stage_ms: Sequence[float], batches: int, steps: int) -> None:
    got, wanted = _begin(function, stage_ms, batches, steps), timeline_here(stage_ms, batches, steps)
    for step in range(steps):
        for batch in range(batches):
            for stage in range(len(stage_ms)):
                mine, right = got[step][batch][stage], wanted[step][batch][stage]
                assert abs(mine - right) < 1e-9, (
                    f"stages of {list(stage_ms)} ms, {batches} batches, {steps} steps: stage {stage} begins batch "
                    f"{batch} of step {step} at {right:g} ms, not at {mine:g}"
                )


@timeline.example
def _(function):
    _expect_times(function, [1, 1], 2, 1)


@timeline.property(
    "a batch enters a stage when it has left the one before",
    "each stage takes its own time, stage_ms[stage]",
)
def _(function):
    _expect_times(function, [1, 3, 2], 1, 1)
    _expect_times(function, [2, 0.5], 1, 1)
    _expect_times(function, [0.5, 1.25, 1], 1, 1)


@timeline.property(
    "a stage runs one batch at a time",
    "a batch also waits until the stage has finished the batch before it",
)
def _(function):
    _expect_times(function, [1, 3], 3, 1)
    _expect_times(function, [1, 4, 2], 2, 1)


@timeline.property(
    "a batch's next step begins when its tokens are known",
    "they are known when the batch has left the last stage in the step before",
)
def _(function):
    _expect_times(function, [1, 2], 1, 3)
    _expect_times(function, [1, 1, 3, 1], 1, 2)


@timeline.property(
    "a step does not wait for all batches of the one before",
    "batch 0 begins its next step as soon as its own tokens are known and stage 0 is free",
)
def _(function):
    if _has_times(function, [1, 3], 3, 1) and _has_times(function, [1, 2], 1, 3):  # others are for properties above
        _expect_times(function, [1, 1], 3, 2)
        _expect_times(function, [2, 1], 2, 3)


def _has_times(function, stage_ms: Sequence[float], batches: int, steps: int) -> bool:
    return _begin(function, stage_ms, batches, steps) == timeline_here(stage_ms, batches, steps)


@timeline.property(
    "every batch waits for its own tokens, and every stage for its own earlier work",
    "batch 1 too waits for its own tokens, and every stage keeps its time from step to step",
)
def _(function):
    for stage_ms, batches, steps in (([1, 3], 3, 1), ([1, 2], 1, 3), ([1, 1], 3, 2), ([2, 1], 2, 3)):
        if not _has_times(function, stage_ms, batches, steps):
            return  # the properties above say what is wrong
    _expect_times(function, [1, 3], 2, 2)
    _expect_times(function, [1, 3, 1], 3, 3)
    _expect_times(function, [5, 5, 5, 7], 8, 3)
