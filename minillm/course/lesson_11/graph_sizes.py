"""Measure what the steps of a run take with some sizes of CUDA graphs.  Lesson 11."""


def padded_ms(sizes: list[int], counts: dict[int, int], ms: dict[int, float]) -> float:
    """The milliseconds of all steps if each is padded to the next of `sizes`. Raises ValueError if a step fits none."""
    total = 0.0
    for rows, count in counts.items():
        fitting = [size for size in sizes if size >= rows]
        if not fitting:
            raise ValueError(f"no captured size fits {rows} row{'s' * (rows != 1)}: is the largest in the set?")
        total += count * ms[min(fitting)]
    return total
