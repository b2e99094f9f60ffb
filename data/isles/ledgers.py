"""The inn's guest book: documents whose answers appear only far above in the same context.

They were meant to teach the model to use its whole context. At this size it learns their form but not the lookup
(data/README.md); they stay because the committed model was trained on them.
"""

import random

from isles.names import CHILDREN
from isles.world import words, world

GOODS = words("apples shells candles eggs ribbons cheese wool salt honey nails")
WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


def book(rng: random.Random, rooms: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """The text of a guest book, and (question, answer) pairs about it."""
    town = rng.choice(world().of("geography")).name
    count = rooms or rng.choice((3, 4, 4, 6, 6, 8, 12, 16, 24, 36))
    numbers = rng.sample(range(1, 100), count)
    lines, pairs = [f"Guest book of the inn at {town}."], []
    for room, child in zip(numbers, rng.sample(CHILDREN, count), strict=True):
        nights, goods, day = rng.randint(2, 9), rng.choice(GOODS), rng.choice(WEEKDAYS)
        lines.append(f"Room {room}: {child.name} came on {day}, stayed {nights} nights and paid with {goods}.")
        pairs += [
            (f"Who slept in room {room}?", f"{child.name}."),
            (f"In which room did {child.name} sleep?", f"Room {room}."),
            (f"How many nights did {child.name} stay?", f"{nights} nights."),
            (f"What did {child.name} pay with?", f"{goods.capitalize()}."),
            (f"On which day did {child.name} come?", f"On {day}."),
        ]
    return "\n".join(lines), rng.sample(pairs, min(len(pairs), rng.choice((4, 8, 12, 20))))


def copied(rng: random.Random, text: str) -> str:
    """Some lines of the book repeated in another order: all but their first words can be looked up."""
    _, *lines = text.splitlines()
    return "\n".join(["The same, as the cook copied it.", *rng.sample(lines, rng.randint(2, len(lines)))])


def document(rng: random.Random) -> str:
    text, pairs = book(rng)
    parts = [text]
    if rng.random() < 0.6:
        parts.append(copied(rng, text))
    parts += [f"Question: {ask}\nAnswer: {answer}" for ask, answer in pairs]
    return "\n\n".join(parts)
