"""Dialogue at the market and at school, and the letters page of the almanac.

People in a story may mention any fact, held out or not. The letters page, a list of questions and answers, uses only
facts that may be asked about. Nothing here offers options to choose from.
"""

import random
from functools import cache

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


@cache
def held_out() -> frozenset[tuple[str, str]]:
    return frozenset((fact.entity.name, fact.attribute.name) for fact in world().facts if fact.held_out)


@cache
def askable() -> tuple[Entity, ...]:
    """Entities with at least one fact that may be asked about."""
    return tuple(
        entity
        for entity in world().entities
        if any((entity.name, attribute.name) not in held_out() for attribute in entity.subject.attributes)
    )


def slots(rng: random.Random, entity: Entity, may_be_held_out: bool) -> dict[str, str]:
    attributes = entity.subject.attributes
    if not may_be_held_out:
        attributes = [each for each in attributes if (entity.name, each.name) not in held_out()]
    attribute = rng.choice(attributes)
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
    talk, count = rng.random() < 0.85, rng.choice((1, 2, 3, 4, 6))
    among = world().entities if talk else askable()
    one = rng.choice(among)
    entities = [one if rng.random() < 0.4 else rng.choice(among) for _ in range(count)]
    if talk:
        return "\n".join(rng.choice(TALK).format(**slots(rng, entity, True)) for entity in entities)
    form = rng.choice(PAGE)
    head = rng.choice(HEADS)
    letters = "\n\n".join(form.format(**slots(rng, entity, False)) for entity in entities)
    return f"{head}\n\n{letters}" if head else letters
