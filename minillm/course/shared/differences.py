"""Compare a result with the right one, and say where the two differ most.

The numbers in a message have as many digits as it takes to tell the right one from the other.
"""

import torch
from torch import Tensor

SHOWN = 6  # numbers: a larger result is not shown in full
DIGITS = 6  # significant, where they tell two numbers apart
MOST_DIGITS = 17  # of a float64
LEAST = 1e-300  # so that nothing is divided by 0


def assert_near(found: Tensor, expected: Tensor, what: str, *, relative: float = 0.0, absolute: float = 0.0) -> None:
    """Assert that each number of `found` is near that of `expected`, a tensor of the same shape; NaN is near NaN only.

    They may differ by absolute + relative * |expected|. what: what was computed, in words; begins the message.
    """
    said = difference(found, expected, relative=relative, absolute=absolute)
    assert not said, f"{what}: {said}"


def difference(found: Tensor, expected: Tensor, *, relative: float = 0.0, absolute: float = 0.0) -> str:
    """Where the two differ most, in words; an empty string if they are as near as `assert_near` says."""
    found, expected = (each.detach().double().cpu() for each in (found, expected))
    allowed = (absolute + relative * expected.abs()).nan_to_num(nan=0.0, posinf=0.0).clamp(min=LEAST)
    far = _distance(found, expected) / allowed
    off = far > 1
    if not off.any():
        return ""
    pairs = zip(expected.flatten().tolist(), found.flatten().tolist(), off.flatten().tolist(), strict=True)
    if found.numel() == 1:
        wanted, got = apart(expected.item(), found.item())
        return f"expected {wanted}, got {got}"
    place = [int(each) for each in torch.unravel_index(far.argmax(), far.shape)]
    if found.numel() <= SHOWN:
        shown = [apart(*pair) if differ else (_short(pair[0], DIGITS),) * 2 for *pair, differ in pairs]
        wanted, got = (f"[{', '.join(each)}]" for each in zip(*shown, strict=True))
        return f"expected {wanted}, got {got}; the largest difference is at {place}"
    wanted, got = apart(expected[tuple(place)].item(), found[tuple(place)].item())
    count = int(off.sum())
    return f"expected {wanted} at {place}, got {got} ({count:,} of {off.numel():,} numbers differ, this one most)"


def apart(one: float, other: float, digits: int = DIGITS) -> tuple[str, str]:
    """Both numbers with the same significant digits, `digits` or as many more as it takes to tell them apart."""
    while digits < MOST_DIGITS and one != other and _short(one, digits) == _short(other, digits):
        digits += 1
    return _short(one, digits), _short(other, digits)


def _distance(found: Tensor, expected: Tensor) -> Tensor:
    """|found - expected|; infinite if one of them is NaN or infinite and the other is not the same."""
    same = (found == expected) | (found.isnan() & expected.isnan())
    distance = (found - expected).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(same, 0.0, distance)


def _short(number: float, digits: int) -> str:
    return f"{number:.{digits}g}"
