"""Compare a learner's prediction with the floor and the measurement."""


def compare(
    what: str,
    *,
    unit: str,
    measured: float,
    prediction: float | None = None,
    floor: float | None = None,
    most: float | None = None,
) -> None:
    """Print one line with the prediction, this machine's limit and the measurement, all in `unit`.  Lesson 00.

    floor: the lower bound. most: the upper bound; for a rate (a unit that ends in "/s"), `floor` is the upper bound.
    """
    if unit.endswith("/s") and most is None:
        floor, most = None, floor
    words = [f"{what}:"]
    after = unit if unit == "%" else f" {unit}"
    words.append("no prediction," if prediction is None else f"predicted {_short(prediction)}{after},")
    if floor is not None:
        words.append(f"floor {_short(floor)}{after},")
    if most is not None:
        words.append(f"at most {_short(most)}{after},")
    words.append(f"measured {_short(measured)}{after}")
    if floor:
        words.append(f"({measured / floor:.1f} times the floor)")
    if most:
        words.append(f"({measured / most:.0%} of what is possible)")
    print(" ".join(words))


def _short(value: float) -> str:
    """The value with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
