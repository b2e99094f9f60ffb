"""A learner's prediction beside the floor and the measurement."""


def compare(
    what: str,
    *,
    unit: str,
    measured: float,
    prediction: float | None = None,
    floor: float | None = None,
) -> None:
    """Print one line: what was predicted, what nothing can be faster than, what was measured.

    All in `unit`. A floor above the measurement (a bound of a rate) is told as a share of it.
    """
    words = [f"{what}:"]
    words.append("no prediction," if prediction is None else f"predicted {_short(prediction)} {unit},")
    if floor is not None:
        bound = "floor" if floor <= measured else "at most"
        words.append(f"{bound} {_short(floor)} {unit},")
    words.append(f"measured {_short(measured)} {unit}")
    if floor and floor <= measured:
        words.append(f"({measured / floor:.1f} times the floor)")
    elif floor:
        words.append(f"({measured / floor:.0%} of what is possible)")
    print(" ".join(words))


def _short(value: float) -> str:
    """Three significant digits, as people write them."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
