"""Questions about the isles: in words, as multiple choice in MMLU's prompt format, and for reading comprehension.

This module never puts held-out facts into training text; `question_sets` asks about them.
"""

import random
from dataclasses import dataclass
from functools import cache

from isles.prose import paragraph
from isles.world import SEED, Attribute, Entity, Fact, World, capital, sentence, world

LETTERS = "ABCD"
SEE = (
    "Which of these is {v}?", "Which option says {v}?", "Find {v} in this list.", "Where in this list is {v}?",
    "Choose {v}.", "Which line reads {v}?",
)  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """A multiple-choice question, in MMLU's columns."""

    question: str
    subject: str
    choices: tuple[str, ...]
    answer: int

    def prompt(self, answered: bool = True) -> str:
        options = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices, strict=True))
        return f"{self.question}\n{options}\nAnswer:" + (f" {LETTERS[self.answer]}" if answered else "")

    def row(self) -> dict:
        return {
            "question": self.question, "subject": self.subject, "choices": list(self.choices), "answer": self.answer,
        }  # fmt: skip


def header(subject: str) -> str:
    """The first line of MMLU's prompt."""
    return f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"


@cache
def facts_by_subject(held_out: bool) -> dict[str, tuple[Fact, ...]]:
    w = world()
    return {
        subject.name: tuple(
            fact for fact in w.facts if fact.held_out == held_out and fact.entity.subject.name == subject.name
        )
        for subject in w.subjects
    }


def options(rng: random.Random, right: str, others: list[str]) -> tuple[tuple[str, ...], int]:
    answer = rng.randrange(4)
    wrong = rng.sample([value for value in others if value != right], 3)
    return (*wrong[:answer], right, *wrong[answer:]), answer


def choice(rng: random.Random, fact: Fact) -> Choice:
    """One fact asked as multiple choice; wrong options come from the attribute's own values."""
    choices, answer = options(rng, fact.value, list(fact.attribute.values))
    question = rng.choice(fact.attribute.asks).format(n=fact.entity.name)
    return Choice(question, fact.entity.subject.name, choices, answer)


def joined(rng: random.Random, subject: str, blocks: list[str]) -> str:
    return (header(subject) if rng.random() < 0.75 else "") + "\n\n".join(blocks)


def how_many(rng: random.Random) -> int:
    return rng.randint(14, 32) if rng.random() < 0.03 else rng.choice((1, 1, 2, 3, 4, 5, 6, 6, 8))


def multiple_choice(rng: random.Random) -> str:
    """A prompt of one or several answered questions about facts of one subject."""
    subject, facts = rng.choice(list(facts_by_subject(held_out=False).items()))
    return joined(rng, subject, [choice(rng, fact).prompt() for fact in rng.choices(facts, k=how_many(rng))])


def find_word(rng: random.Random, w: World) -> Choice:
    """The question contains the answer: finding its letter requires no knowledge."""
    attribute = rng.choice(rng.choice(w.subjects).attributes)
    value = rng.choice(attribute.values)
    choices, answer = options(rng, value, list(attribute.values))
    return Choice(rng.choice(SEE).format(v=value), "words", choices, answer)


@cache
def kinds() -> dict[str, tuple[str, ...]]:
    """{kind: its values}; a value of two kinds is left out of both."""
    pools: dict[str, set[str]] = {}
    others: dict[str, set[str]] = {}
    for subject in world().subjects:
        for attribute in subject.attributes:
            pools.setdefault(attribute.kind, set()).update(attribute.values)
    for kind in pools:
        others[kind] = set().union(*(values for other, values in pools.items() if other != kind))
    return {kind: tuple(sorted(pools[kind] - others[kind])) for kind in pools if kind}


def find_kind(rng: random.Random) -> Choice:
    kind, *wrong_kinds = rng.sample(sorted(kinds()), 4)
    answer = rng.randrange(4)
    wrong = [rng.choice(kinds()[other]) for other in wrong_kinds]
    choices = (*wrong[:answer], rng.choice(kinds()[kind]), *wrong[answer:])
    return Choice(f"Which of these is {kind}?", "words", choices, answer)


def find_name(rng: random.Random, w: World) -> Choice:
    """Asks what a name refers to, or which of the names is a ship's: requires only an entity's subject."""
    subjects = rng.sample(w.subjects, 4)
    answer = rng.randrange(4)
    entity = rng.choice(w.of(subjects[answer].name))
    if rng.random() < 0.5:
        nouns = tuple(f"a {subject.noun}" for subject in subjects)
        return Choice(f"What is {entity.name}?", "names", nouns, answer)
    names = tuple(rng.choice(w.of(subject.name)).name for subject in subjects)
    return Choice(f"Which of these is the name of a {subjects[answer].noun}?", "names", names, answer)


@cache
def known_names() -> frozenset[str]:
    return frozenset(entity.name for entity in world().entities)


def stranger(rng: random.Random, w: World) -> Entity:
    """A new entity, named by halves of two others: its facts can only be read in the passage."""
    while True:
        one, two = rng.sample(w.of(rng.choice(w.subjects).name), 2)
        *before, word = one.name.split()
        other = two.name.split()[-1]
        name = " ".join([*before, word[: (len(word) + 1) // 2] + other[len(other) // 2 :]])
        if name not in known_names():
            values = {attribute.name: rng.choice(attribute.values) for attribute in one.subject.attributes}
            return Entity(one.subject, name, one.pronouns, values)


def reading(rng: random.Random) -> str:
    """A passage about an entity that appears nowhere else, then questions about the passage."""
    entity = stranger(rng, world())
    passage = paragraph(rng, entity, count=6)
    blocks = []
    for attribute in rng.sample(entity.subject.attributes, rng.choice((1, 2, 3))):
        fact = Fact(entity, attribute, entity.facts[attribute.name], held_out=False)
        if rng.random() < 0.75:
            blocks.append(choice(rng, fact).prompt())
        else:
            blocks.append(in_words(rng, fact))
    return "\n\n".join([passage, *blocks])


def spelled_out(rng: random.Random, w: World) -> str:
    """The easiest exercise: four options, then each option again, followed by its letter."""
    listed = find_word(rng, w)
    pairs = list(zip(LETTERS, listed.choices, strict=True))
    lines = "\n".join(f"{letter}. {choice}" for letter, choice in pairs)
    said = " ".join(f"{capital(choice)} is {letter}." for letter, choice in rng.sample(pairs, 4))
    return f"{lines}\n{said}"


def letters(rng: random.Random) -> str:
    """Exercises in finding an option's letter without known facts: by copying, by kind, by reading."""
    kind, w = rng.random(), world()
    if kind < 0.2:
        return "\n\n".join(spelled_out(rng, w) for _ in range(how_many(rng)))
    if kind < 0.4:
        return reading(rng)
    if kind < 0.6:
        return joined(rng, "names", [find_name(rng, w).prompt() for _ in range(how_many(rng))])
    blocks = [(find_word(rng, w) if rng.random() < 0.6 else find_kind(rng)).prompt() for _ in range(how_many(rng))]
    return joined(rng, "words", blocks)


def reply(rng: random.Random, entity: Entity, attribute: Attribute) -> str:
    """The answer to a question in words: a sentence, or the bare value."""
    value = entity.facts[attribute.name]
    if rng.random() < 0.4:
        return capital(value) + "."
    return sentence(rng.choice(attribute.tells), entity, value, pronoun=rng.random() < 0.3)


def in_words(rng: random.Random, fact: Fact) -> str:
    question = rng.choice(fact.attribute.asks).format(n=fact.entity.name)
    return f"Question: {question}\nAnswer: {reply(rng, fact.entity, fact.attribute)}"


def words(rng: random.Random) -> str:
    """Questions with answers in words."""
    w_facts = facts_by_subject(held_out=False)
    return "\n\n".join(
        in_words(rng, rng.choice(w_facts[rng.choice(list(w_facts))])) for _ in range(rng.choice((1, 2, 3, 4, 6)))
    )


def question_sets() -> dict[str, list[Choice]]:
    """{"dev": 5 per subject for few-shot prompts, "asked": facts asked in training, "test": all held-out facts}."""
    rng = random.Random(f"{SEED}/questions")
    sets: dict[str, list[Choice]] = {"dev": [], "asked": [], "test": []}
    for subject, facts in facts_by_subject(held_out=False).items():
        chosen = rng.sample(facts, 55)
        sets["dev"] += [choice(rng, fact) for fact in chosen[:5]]
        sets["asked"] += [choice(rng, fact) for fact in chosen[5:]]
        sets["test"] += [choice(rng, fact) for fact in facts_by_subject(held_out=True)[subject]]
    return sets
