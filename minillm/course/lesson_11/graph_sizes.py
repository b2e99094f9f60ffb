"""What the steps of a run take with some sizes of CUDA graphs.  Lesson 11."""


def padded_ms(sizes: list[int], counts: dict[int, int], ms: dict[int, float]) -> float:
    """The milliseconds of all steps if each is padded to the next of `sizes`."""
    return sum(count * ms[min(size for size in sizes if size >= rows)] for rows, count in counts.items())
