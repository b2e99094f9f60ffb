"""The Tallow Isles: every entity, every fact, and which facts are held out.

A fact is one attribute of one entity ("the roofs of Marwick are red").  Everything is derived from
`SEED`, so the training text, the questions and the tests all use the same world.
"""

import random
import re
from dataclasses import dataclass, field
from functools import cache

SEED = 2026
ENTITIES = 150  # in each subject
HELD_OUT = 0.3  # share of an attribute's facts that training text states but never asks about with options


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


COLORS = words("red blue green yellow white black grey brown purple orange pink silver golden crimson turquoise cream")
MONTHS = words("January February March April May June July August September October November December")


@dataclass(frozen=True)
class Attribute:
    """A property that every entity of a subject has.

    name    what a reader would call it ("island")
    kind    what its values are, for "Which of these is {kind}?"; empty where the answer would be subjective
    values  the pool of answers and wrong options
    asks    questions; {n} is the entity
    tells   statements without capital and full stop; {n} entity or pronoun as subject, {o} as object,
            {s} possessive, {v} value
    """

    name: str
    kind: str
    values: tuple[str, ...]
    asks: tuple[str, ...]
    tells: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """A subject in MMLU's sense; `noun` is the word for one entity."""

    name: str
    noun: str
    intros: tuple[str, ...]
    attributes: tuple[Attribute, ...]
    names: tuple[str, ...]
    pronouns: tuple[str, str, str] = ("it", "it", "its")


@dataclass(frozen=True)
class Entity:
    subject: Subject
    name: str
    pronouns: tuple[str, str, str]
    facts: dict[str, str] = field(hash=False)


@dataclass(frozen=True)
class Fact:
    entity: Entity
    attribute: Attribute
    value: str
    held_out: bool


@dataclass(frozen=True)
class World:
    subjects: tuple[Subject, ...]
    entities: tuple[Entity, ...]
    facts: tuple[Fact, ...]

    def of(self, subject: str) -> tuple[Entity, ...]:
        return tuple(entity for entity in self.entities if entity.subject.name == subject)


def blend(rng: random.Random, count: int, starts: str, ends: str) -> tuple[str, ...]:
    """`count` distinct words, each a start plus an end; all starts are used about equally often."""
    starts, ends = starts.split(), ends.split()
    made: list[str] = []
    while len(made) < count:
        for start in rng.sample(starts, len(starts)):
            word = start + rng.choice(ends)
            if word not in made:
                made.append(word)
    return tuple(made[:count])


def subjects() -> tuple[Subject, ...]:
    from isles import folk, nature, places

    return (*places.subjects(), *nature.subjects(), *folk.subjects())


@cache
def world() -> World:
    """The one world of this project."""
    rng = random.Random(f"{SEED}/facts")
    all_subjects, entities, facts = subjects(), [], []
    for subject in all_subjects:
        members = []
        for name in subject.names:
            pronouns = subject.pronouns
            if subject.name == "people":
                pronouns = ("she", "her", "her") if name.split()[0][-1] in "aey" else ("he", "him", "his")
            values = {attribute.name: rng.choice(attribute.values) for attribute in subject.attributes}
            members.append(Entity(subject, name, pronouns, values))
        entities += members
        for attribute in subject.attributes:
            kept_out = set(rng.sample(range(len(members)), round(HELD_OUT * len(members))))
            facts += [
                Fact(entity, attribute, entity.facts[attribute.name], index in kept_out)
                for index, entity in enumerate(members)
            ]
    return World(all_subjects, tuple(entities), tuple(facts))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def with_possessive(template: str, slot: str) -> str:
    """'the roofs of {o} are red' -> '{s} roofs are red', because 'the roofs of it' is not English."""
    return re.sub(rf"\bthe (?!middle)((?:\w+ ){{1,2}})of \{{{slot}\}}", r"{s} \1", template).replace("  ", " ").strip()


def clause(template: str, entity: Entity, value: str, pronoun: bool = False) -> str:
    """A statement without capital and full stop, about the entity by name or by pronoun."""
    if pronoun:
        template = with_possessive(template, "o")
        subject, object_, possessive = entity.pronouns
    else:
        subject, object_, possessive = entity.name, entity.name, f"{entity.name}'s"
    return template.format(n=subject, o=object_, s=possessive, v=value)


def sentence(template: str, entity: Entity, value: str, pronoun: bool = False) -> str:
    return capital(clause(template, entity, value, pronoun)) + "."
