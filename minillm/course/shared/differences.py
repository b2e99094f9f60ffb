"""Compare a result with the right one, and say where the two differ most.

The numbers in a message have as many digits as it takes to tell the right one from the other.
"""

import torch
from torch import Tensor

SHOWN = 6  # numbers: a larger result is not shown in full
DIGITS = 6  # significant, where they tell two numbers apart
MOST_DIGITS = 17  # of a float64
LEAST = 1e-300  # so that nothing is divided by 0
ROUNDED = (127.5, 1.5, -1.5, 0.5, 1.7, -1.7, 1.2, -1.2)  # numbers whose codes tell how they are rounded


Numbers = Tensor | float | list


def assert_near(found: Numbers, expected: Numbers, what: str, *, relative: float = 0.0, absolute: float = 0.0) -> None:
    """Assert that each number of `found` is near that of `expected`, in the same place; NaN is near NaN only.

    They may differ by absolute + relative * |expected|. what: what was computed, in words; begins the message.
    """
    said = difference(found, expected, relative=relative, absolute=absolute)
    assert not said, f"{what}: {said}"


def difference(found: Numbers, expected: Numbers, *, relative: float = 0.0, absolute: float = 0.0) -> str:
    """Return where the two differ most, in words; an empty string if they are as near as `assert_near` says."""
    mine, right = torch.broadcast_tensors(_double(found), _double(expected))
    allowed = (absolute + relative * right.abs()).nan_to_num(nan=0.0, posinf=0.0).clamp(min=LEAST)
    far = _distance(mine, right) / allowed
    off = far > 1
    if not off.any():
        return ""
    pairs = zip(right.flatten().tolist(), mine.flatten().tolist(), off.flatten().tolist(), strict=True)
    if mine.numel() == 1:
        wanted, got = apart(right.item(), mine.item())
        return f"expected {wanted}, got {got}"
    if mine.numel() <= SHOWN:
        shown = [apart(*pair) if differ else tuple(_short(each, DIGITS) for each in pair) for *pair, differ in pairs]
        wanted, got = (f"[{', '.join(each)}]" for each in zip(*shown, strict=True))
        return f"expected {wanted}, got {got}"
    place = [int(each) for each in torch.unravel_index(far.argmax(), far.shape)]
    wanted, got = apart(right[tuple(place)].item(), mine[tuple(place)].item())
    most = "; this is the largest relative difference" if relative else ", this one most"
    alike = bool((far[off] == far.max()).all())
    said = f"{int(off.sum()):,} of {off.numel():,} numbers differ{'' if alike else most}"
    return f"expected {wanted} at {place}, got {got} ({said})"


def why_wrong(code: float, got: float, lowest: int, highest: int, codes: Tensor) -> str:
    """Return why a half next to an outermost code became `got`, not `code`. codes: the solution's, of ROUNDED."""
    _, *halves, up, down, near, other = [round(each, 3) for each in codes.tolist()]
    if got > highest:
        return f"Codes go up to {highest}"
    if (up, down, near, other) != (2, -2, 1, -1):
        return "Codes are rounded to the nearest number, as with torch.round"
    if code == lowest and halves == [2, -2, 0]:
        return f"Codes go down to {lowest}"
    return "Halves go to the even number, as with torch.round"


def text(values: Tensor, most: int = 8) -> str:
    """The first numbers of a tensor, for a message: "[0.1, -2, 30, ...]"."""
    shown = [_short(value, DIGITS) for value in values.detach().flatten()[:most].double().tolist()]
    return f"[{', '.join(shown)}{', ...' if values.numel() > most else ''}]"


def apart(one: float, other: float, digits: int = DIGITS) -> tuple[str, str]:
    """Both numbers with the same significant digits, `digits` or as many more as it takes to tell them apart."""
    while digits < MOST_DIGITS and one != other and _short(one, digits) == _short(other, digits):
        digits += 1
    return _short(one, digits), _short(other, digits)


def _double(numbers: Numbers) -> Tensor:
    return torch.as_tensor(numbers, dtype=torch.float64).detach().cpu()


def _distance(found: Tensor, expected: Tensor) -> Tensor:
    """|found - expected|; infinite if one of them is NaN or infinite and the other is not the same."""
    same = (found == expected) | (found.isnan() & expected.isnan())
    distance = (found - expected).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(same, 0.0, distance)


def _short(number: float, digits: int) -> str:
    return f"{number:.{digits}g}"
