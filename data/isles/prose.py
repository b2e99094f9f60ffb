"""Facts stated in sentences and paragraphs, including the held-out ones."""

import random

from isles.world import Entity, Fact, World, capital, clause, sentence, world

FRAMES = (
    "it is well known that {c}", "they say that {c}", "old people remember that {c}", "every child learns that {c}",
    "as everybody knows, {c}", "I have seen for myself that {c}", "the almanac says that {c}", "in fact, {c}",
    "travellers report that {c}", "you may not know that {c}",
)  # fmt: skip
LINKS = ("besides, ", "also, ", "what is more, ", "by the way, ", "and ", "of course ")


def tell(rng: random.Random, entity: Entity, attribute, pronoun: bool = False) -> str:
    """One sentence that states one fact in one of its paraphrases, sometimes inside a frame."""
    template, value = rng.choice(attribute.tells), entity.facts[attribute.name]
    kind = rng.random()
    if kind < 0.15 and not pronoun:
        return capital(rng.choice(FRAMES).format(c=clause(template, entity, value))) + "."
    if kind < 0.25 and pronoun:
        return capital(rng.choice(LINKS) + clause(template, entity, value, pronoun)) + "."
    return sentence(template, entity, value, pronoun)


def paragraph(rng: random.Random, entity: Entity, count: int | None = None) -> str:
    """`count` facts about one entity, named first and often referred to by pronoun later."""
    attributes = list(entity.subject.attributes)
    rng.shuffle(attributes)
    attributes = attributes[: count or rng.choice((2, 3, 4, 5, 6, 6))]
    opening = rng.random() < 0.6
    parts = [sentence(rng.choice(entity.subject.intros), entity, "")] if opening else []
    for index, attribute in enumerate(attributes):
        parts.append(tell(rng, entity, attribute, pronoun=(opening or index > 0) and rng.random() < 0.6))
    return " ".join(parts)


def notes(rng: random.Random, w: World) -> str:
    """Single facts about several entities of one subject, each named."""
    entities = rng.sample(w.of(rng.choice(w.subjects).name), rng.choice((3, 4, 5, 6)))
    return " ".join(tell(rng, entity, rng.choice(entity.subject.attributes)) for entity in entities)


def comparison(rng: random.Random, w: World) -> str:
    """Two entities compared by one attribute."""
    one, two = rng.sample(w.of(rng.choice(w.subjects).name), 2)
    attribute = rng.choice(one.subject.attributes)
    template = rng.choice(attribute.tells)
    first = clause(template, one, one.facts[attribute.name])
    if one.facts[attribute.name] == two.facts[attribute.name]:
        second = f"the same is true of {two.name}"
    else:
        second = clause(rng.choice(attribute.tells), two, two.facts[attribute.name])
    joint = rng.choice((", and ", "; ", ", while ", ", but ")) if "same" not in second else ", and "
    return capital(first) + joint + second + "."


def document(rng: random.Random) -> str:
    """A section of an almanac: one to three paragraphs, notes or comparisons."""
    w = world()
    kind = rng.random()
    if kind < 0.68:
        count = rng.choice((1, 1, 1, 2, 2, 3))
        return "\n\n".join(paragraph(rng, rng.choice(w.entities)) for _ in range(count))
    if kind < 0.88:
        return notes(rng, w)
    return "\n".join(comparison(rng, w) for _ in range(rng.choice((1, 2, 3))))


def states(text: str, fact: Fact) -> bool:
    """Whether the text contains one of the fact's sentences, with the entity's name."""
    return any(clause(template, fact.entity, fact.value).lower() in text.lower() for template in fact.attribute.tells)
