"""Simple arithmetic: as formulas, in words, and as word problems."""

import random

from isles.names import CHILDREN, Child
from isles.world import words

THINGS = words("plums shells buttons candles marbles acorns pebbles ribbons kites spoons cherries feathers")


def problem(rng: random.Random) -> tuple[int, str, int, int]:
    """(a, operator, b, result); nothing above 144 or below 0."""
    kind = rng.random()
    if kind < 0.45:
        a, b = rng.randint(0, 99), rng.randint(0, 40)
        return a, "+", b, a + b
    if kind < 0.75:
        a = rng.randint(0, 99)
        b = rng.randint(0, a)
        return a, "-", b, a - b
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    return a, "x", b, a * b


WORD = {"+": "plus", "-": "minus", "x": "times"}


def question(rng: random.Random) -> tuple[str, str]:
    """A sum asked in words or signs, and its answer as a sentence."""
    a, sign, b, result = problem(rng)
    if rng.random() < 0.5:
        return f"What is {a} {WORD[sign]} {b}?", f"{a} {WORD[sign]} {b} is {result}."
    asks = (f"What is {a} {sign} {b}?", f"How much is {a} {sign} {b}?", f"{a} {sign} {b} = ?")
    return rng.choice(asks), f"{a} {sign} {b} = {result}."


def tale(rng: random.Random) -> tuple[str, str]:
    """A word problem and its answer."""
    child: Child = rng.choice(CHILDREN)
    things, a = rng.choice(THINGS), rng.randint(3, 30)
    b = rng.randint(2, a - 1)
    if rng.random() < 0.5:
        return (
            f"{child.name} has {a} {things} and finds {b} more. How many {things} does {child.they} have now?",
            f"{a} + {b} = {a + b}. {child.name} has {a + b} {things}.",
        )
    return (
        f"{child.name} has {a} {things} and gives {b} of them away. How many {things} are left?",
        f"{a} - {b} = {a - b}. {child.name} has {a - b} {things} left.",
    )


def document(rng: random.Random) -> str:
    lines = []
    for _ in range(rng.choice((2, 3, 5, 8, 12))):
        kind = rng.random()
        if kind < 0.5:
            a, sign, b, result = problem(rng)
            lines.append(f"{a} {sign} {b} = {result}")
        else:
            ask, answer = question(rng) if kind < 0.8 else tale(rng)
            lines.append(f"Question: {ask}\nAnswer: {answer}")
    return "\n".join(lines)
