"""Compare a learner's prediction with the floor and the measurement."""

import math
from numbers import Real

_compared: dict[str, tuple[float, float | None, str]] = {}  # what: predicted, measured, unit


def compare(
    what: str,
    *,
    unit: str,
    measured: float | None,
    prediction: float | None = None,
    floor: float | None = None,
    most: float | None = None,
    by: str = "measured",
) -> None:
    """Print one line with the prediction, this machine's limit and the measurement, all in `unit`.  Lesson 00.

    floor: the lower bound. most: the upper bound; for a rate (a unit that ends in "/s"), `floor` is the upper bound.
    measured: None if there is no result, for example because what was to be measured failed. by: how it was found.
    """
    if unit.endswith("/s") and most is None:
        floor, most = None, floor
    words = [f"{what}:"]
    _compared.pop(what, None)  # a prediction that was taken back or became text does not stay
    if prediction is None:
        words.append("no prediction,")
    elif isinstance(prediction, Real):
        words.append(f"predicted {_with_unit(prediction, unit)},")
        _compared[what] = (float(prediction), measured, unit)
    else:
        words.append(f"predicted {prediction!r} (write a number, without the unit),")
    if floor is not None:
        words.append(f"floor {_with_unit(floor, unit)},")
    if most is not None:
        words.append(f"at most {_with_unit(most, unit)},")
    words.append("not measured" if measured is None else f"{by} {_with_unit(measured, unit)}")
    if floor and measured is not None:
        words.append(f"({measured / floor:.1f} times the floor)")
    if most and measured is not None:
        words.append(f"({measured / most:.0%} of what is possible)")
    print(" ".join(words))


def look_back() -> str:
    """Every prediction that was compared in this process, the farthest off first: one line each.  Lesson 99."""
    if not _compared:
        return "no predicted number to look back on: write your own into the cells that ask for one"
    width = max(map(len, _compared))
    numbers = [_short(each) for *pair, _ in _compared.values() for each in pair if each is not None]
    column = max(map(len, ["predicted", *numbers])) + 2
    lines = [f"{'':{width}}{'predicted':>{column}}{'measured':>{column}}"]
    for what, (predicted, measured, unit) in sorted(_compared.items(), key=lambda each: -_factor(*each[1][:2])):
        off = _factor(predicted, measured)
        if measured is None:
            lines.append(f"{what:{width}}{_short(predicted):>{column}}{'-':>{column}}  {unit}: not measured")
            continue
        if predicted == measured or 0 < off < 1.05:
            said = "as measured"
        elif off:
            said = f"too {'high' if predicted > measured else 'low'} by a factor of {off:,.1f}"
        else:
            said = "no factor: one of the two is not above 0"
        both = "".join(f"{_short(each):>{column}}" for each in (predicted, measured))
        lines.append(f"{what:{width}}{both}  {unit}: {said}".rstrip(" :"))
    return "\n".join(lines)


def _factor(predicted: float, measured: float | None) -> float:
    """Return how many times as large one of them is as the other; 0 if there is no such number."""
    if measured is None or measured <= 0 or not 0 < predicted < math.inf:
        return 0.0
    return max(predicted / measured, measured / predicted)


def _with_unit(value: float, unit: str) -> str:
    """ "3 ms", but "45%"."""
    return f"{_short(value)}{'' if unit.startswith('%') else ' '}{unit}"


def _short(value: float) -> str:
    """The value with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
