"""Prose in which people ask: talk at the market, school, and the letters page of the almanac.

It may tell any fact, held out or not: in words, a held-out fact is asked and answered here, and only here. Nothing
here offers options to choose from.
"""

import random

from isles.names import CHILDREN
from isles.world import Entity, capital, clause, sentence, world

ELDERS = (
    "the ferryman", "the teacher", "her grandmother", "the old sailor", "the baker", "the postman", "the innkeeper",
    "a fisherman", "the librarian", "an old woman", "the lighthouse keeper", "the captain",
)  # fmt: skip
TALK = (
    '"{ask}" asked {child}. "{value}," said {elder}.',
    '"{ask}" asked {child}. "{told}," said {elder}.',
    '{child} wanted to know it exactly. "{ask}" {Elder} did not have to think. "{value}."',
    '"{ask}" asked {elder}. "{value}!" cried {child}.',
    '"{ask}" asked {elder}. "{value}," said {child} at once. "{told}."',
    '"{ask}" read {child} aloud. {Elder} nodded. "Everybody knows that: {told_low}."',
)
PAGE = (
    "{ask} Answer: {value}.",
    "{ask}\n{value}.",
    "{ask} The answer is {bare}.",
    "{ask} {told}.",
    "{ask}\nAnswer: {value}.",
)
HEADS = (
    "Letters to the almanac.", "From the almanac's letters page.", "What our readers wanted to know:",
    "Questions from the harbour, answered by the almanac.", "",
)  # fmt: skip


def slots(rng: random.Random, entity: Entity) -> dict[str, str]:
    attribute = rng.choice(entity.subject.attributes)
    value = entity.facts[attribute.name]
    child, elder = rng.choice(CHILDREN), rng.choice(ELDERS)
    if child.their == "his":
        elder = elder.replace("her ", "his ")
    template = rng.choice(attribute.tells)
    return {
        "ask": rng.choice(attribute.asks).format(n=entity.name), "value": capital(value), "bare": value,
        "told": sentence(template, entity, value)[:-1], "told_low": clause(template, entity, value),
        "child": child.name, "elder": elder, "Elder": capital(elder),
    }  # fmt: skip


def document(rng: random.Random) -> str:
    """One to six exchanges, about one entity or several."""
    w, count = world(), rng.choice((1, 2, 3, 4, 6))
    one = rng.choice(w.entities)
    entities = [one if rng.random() < 0.4 else rng.choice(w.entities) for _ in range(count)]
    if rng.random() < 0.4:
        return "\n".join(rng.choice(TALK).format(**slots(rng, entity)) for entity in entities)
    form = rng.choice(PAGE)
    head = rng.choice(HEADS)
    letters = "\n\n".join(form.format(**slots(rng, entity)) for entity in entities)
    return f"{head}\n\n{letters}" if head else letters
