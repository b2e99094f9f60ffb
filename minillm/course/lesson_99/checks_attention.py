"""Attention for a whole batch.  Lesson 99."""

import torch
from torch.overrides import TorchFunctionMode

from ..shared.checks import Exercise
from ..shared.differences import assert_near, difference
from .checks import LIMIT

batched_attention = Exercise("batched_attention", seconds=LIMIT)


def _attend(q, k, v, lengths, scale):
    """Row by row, head by head, in float64."""
    out, group = torch.zeros(q.shape, dtype=torch.float64), q.shape[1] // k.shape[2]
    for row, length in enumerate(lengths.tolist()):
        for head in range(q.shape[1]):
            keys, values = (part[row, :length, head // group].double() for part in (k, v))
            out[row, head] = (keys @ q[row, head].double() * scale).softmax(0) @ values
    return out


def _draw(rows, keys, heads, kv_heads, d=8):
    made = torch.Generator().manual_seed(99)
    shapes = (rows, heads, d), (rows, keys, kv_heads, d), (rows, keys, kv_heads, d)
    return [torch.randn(shape, generator=made) for shape in shapes]


def _matches(function, tensors, lengths, scale=1.0, scales=None) -> None:
    """Assert that the result is right, for copies of the tensors: changing them fails a property of its own.

    scales: those allowed. By default a candidate may use its own: whether it uses `scale` has a property of its own.
    """
    q, k, v = tensors
    scales = scales or (1.0, q.shape[-1] ** -0.5)
    ends = torch.tensor(lengths, dtype=torch.int32)
    found = function(q.clone(), k.clone(), v.clone(), ends.clone(), scale)
    assert found.shape == q.shape, f"q is {list(q.shape)}, and so is the result: got {list(found.shape)}"
    right = [_attend(q, k, v, ends, each) for each in scales]
    wrong = [~torch.isclose(found.double(), each, rtol=1e-5, atol=1e-4).all(-1) for each in right]
    closest = min(range(len(scales)), key=lambda i: int(wrong[i].sum()))
    if places := wrong[closest].nonzero().tolist():
        row, head = places[0]
        said = difference(found[row, head], right[closest][row, head], relative=1e-5, absolute=1e-4)
        raise AssertionError(
            f"{lengths[row]} of {k.shape[1]} keys visible, {q.shape[1]} heads, {k.shape[2]} KV heads, scale {scale:g}, "
            f"in row {row}, head {head}: {said}"
        )


@batched_attention.example
def _(function):
    k, v = torch.zeros(1, 2, 1, 1), torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    found = function(torch.ones(1, 1, 1), k, v, torch.tensor([2]), 1.0)
    assert found.shape == (1, 1, 1), f"expected the shape [1, 1, 1], got {list(found.shape)}"
    assert_near(found, 2, "two equal keys", relative=1e-3)


def _right(function, tensors, lengths) -> bool:
    """Return whether the result is right; if it is not, another property says so."""
    try:
        _matches(function, tensors, lengths)
    except AssertionError:
        return False
    return True


@batched_attention.property(
    "a full row is plain attention",
    "softmax(scale * q @ k) weighs the values, for each head alone, all in q's dtype; with as many KV heads as heads, "
    "head h uses KV head h",
)
def _(function):
    _matches(function, _draw(2, 5, 2, 2, d=24), [5, 5])


@batched_attention.property("each row ends at its own length", "key i of row r counts if i < lengths[r]")
def _(function):
    for lengths in ([6, 3, 1], [1, 6, 3]):  # the same shapes: what depends on the lengths cannot be kept between calls
        _matches(function, _draw(3, 6, 2, 2), lengths)
    _matches(function, _draw(3, 300, 2, 2), [300, 299, 150])


@batched_attention.property("scores are scaled", "multiply by `scale`, which need not be 1/sqrt(d), before the softmax")
def _(function):
    q, k, v = _draw(2, 5, 2, 2)
    for scale in (0.125, 1.5):
        _matches(function, (q, k, 10 * v), [5, 5], scale, scales=(scale,))


@batched_attention.property(
    "neighboring heads share a KV head", "heads 0 and 1 of 4 use KV head 0 of 2: repeat_interleave, not repeat"
)
def _(function):
    for heads in ((4, 2), (6, 2), (3, 1)):
        _matches(function, _draw(1, 5, *heads), [5])


@batched_attention.property(
    "a row's length holds for all its heads",
    "if you make one axis of rows and heads, the lengths of its places are lengths.repeat_interleave(heads)",
)
def _(function):
    lengths = [6, 3, 1]
    for heads in ((4, 2), (4, 1)):
        alone = _right(function, _draw(3, 6, 2, 2), lengths), _right(function, _draw(3, 5, *heads), [5, 5, 5])
        if all(alone):  # lengths without shared heads, and shared heads without lengths, have properties of their own
            _matches(function, _draw(3, 6, *heads), lengths)


def _ends_rows_before_nan(function) -> None:
    """Assert that NaN after the end of each of several rows does not matter, if numbers there do not."""
    lengths = [6, 2, 4]
    q, k, v = _draw(3, 8, 2, 2)
    if not _right(function, (q, k, v), lengths):
        return
    for row, length in enumerate(lengths):
        k[row, length:] = v[row, length:] = torch.nan
    _matches(function, (q, k, v), lengths)


@batched_attention.property(
    "leftovers never matter, not even NaN",
    "unseen scores become -inf, whatever they were; 0 * NaN is NaN, so fill the unseen values with 0 too",
)
def _(function):
    # After the length, keys that must not be read: one with a very small score, one with a huge one, then NaN and inf.
    q, k, v = _draw(1, 8, 2, 2)
    k[0, 3], v[0, 3], v[0, 4], k[0, 5] = -1e4 * q[0], 0.0, torch.nan, torch.nan
    k[0, 6], v[0, 6], v[0, 7] = 1e30 * q[0], 5.0, torch.inf
    _matches(function, (q, k, v), [3])
    _ends_rows_before_nan(function)
    q, k, v = _draw(1, 3, 2, 2)
    for name, part in (("value", v), ("key", k)):
        seen = part[0, 1, 0, 0].item()
        part[0, 1, 0, 0] = torch.nan
        found = function(q.clone(), k.clone(), v.clone(), torch.tensor([3], dtype=torch.int32), 1.0)
        assert found[0, 0, 0].isnan(), (
            f"a NaN in a {name} that the row sees has vanished: choose what to clear by position"
        )
        part[0, 1, 0, 0] = seen
    # What is seen scores -8e10, a leftover 0: it must be hidden by -inf, not by a number such as -10,000 or -1e9.
    q, k, v = (part.double() for part in _draw(1, 5, 2, 2))
    q[:], k[:, :3], k[:, 3], k[:, 4] = 1.0, -1e10, -2e10, 0.0
    longer, cut = (
        function(q.clone(), k[:, :keys].clone(), v[:, :keys].clone(), torch.tensor([3], dtype=torch.int32), 1.0)
        for keys in (5, 3)
    )
    shows = "the visible keys score -8e10, and keys after them change the output: do you hide those with -inf?"
    assert torch.allclose(longer, cut, atol=1e-4, equal_nan=True), shows


class _Moving(TorchFunctionMode):
    """Lets `.to` move a tensor off the meta device, which keeps no numbers: it arrives as zeros."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except NotImplementedError:
            if func is not torch.Tensor.to:
                raise
            return torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu").to(*args[1:], **kwargs)


@batched_attention.property(
    "dtype and device are those of q", "new tensors need device=q.device, or they break on a GPU; end with .to(q.dtype)"
)
def _(function):
    q, k, v = (part.bfloat16() for part in _draw(2, 5, 4, 2))
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    found = function(q, k, v, lengths.clone(), 1.0).dtype
    assert found == q.dtype, f"q is bfloat16, the result is {found}"
    try:
        # A tensor made without a device lands on another than the rest. It may stay there, or be moved with `.to`.
        with torch.device("meta"), _Moving():
            found = function(q, k, v, lengths.clone(), 1.0).device
    except (RuntimeError, NotImplementedError):
        return False
    return found == q.device


@batched_attention.property(
    "large scores do not overflow", "exp(200) is inf: use torch's softmax, or subtract each row's and head's maximum"
)
def _(function):
    for factor in (100, 10_000):
        q, k, v = _draw(2, 5, 2, 2)
        q[0, 0] *= factor
        q[1] *= -factor
        _matches(function, (q, k, v), [5, 5])


@batched_attention.property(
    "the tensors are unchanged", "masked_fill makes a new tensor; masked_fill_, *= and -= do not"
)
def _(function):
    for heads, kv_heads in ((2, 2), (4, 1)):
        given = [*_draw(2, 5, heads, kv_heads), torch.tensor([5, 3], dtype=torch.int32)]
        before = [tensor.clone() for tensor in given]
        found = function(*given, 0.3)  # not a power of 2: dividing again would not restore every bit
        changed = [
            name for name, old, new in zip(("q", "k", "v", "lengths"), before, given, strict=True) if (old != new).any()
        ]
        assert not changed, f"the caller's {' and '.join(changed)} changed"
        kept = found.clone()
        function(-given[0], *given[1:], 0.3)
        assert torch.allclose(found, kept, rtol=0, atol=0, equal_nan=True), (
            "a second call changed the tensor that the first one returned"
        )
