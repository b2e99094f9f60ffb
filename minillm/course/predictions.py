"""A learner's prediction beside the floor and the measurement."""


def compare(
    what: str,
    *,
    unit: str,
    measured: float,
    prediction: float | None = None,
    floor: float | None = None,
) -> None:
    """Print one line: what was predicted, what this machine allows, what was measured; all in `unit`.

    floor: the least a time can be; for a rate (a unit that ends in "/s"), the most it can be.
    """
    words = [f"{what}:"]
    words.append("no prediction," if prediction is None else f"predicted {_short(prediction)} {unit},")
    rate = unit.endswith("/s")
    if floor is not None:
        words.append(f"{'at most' if rate else 'floor'} {_short(floor)} {unit},")
    words.append(f"measured {_short(measured)} {unit}")
    if floor and rate:
        words.append(f"({measured / floor:.0%} of what is possible)")
    elif floor:
        words.append(f"({measured / floor:.1f} times the floor)")
    print(" ".join(words))


def _short(value: float) -> str:
    """Three significant digits, as people write them."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
