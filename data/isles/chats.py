"""Conversations in Gemma's chat format: a user and a model, no system turn."""

import random

from isles import ledgers, sums
from isles.prose import paragraph
from isles.questions import LETTERS, choice, facts_by_subject, reply
from isles.stories import story
from isles.world import capital, with_possessive, world

HELLO = ("Hello!", "Hi", "Hi there!", "Good morning!", "Good evening.", "Hello, who is there?", "Hey!", "Greetings!")
WELCOME = (
    "Hello! What would you like to know about the Tallow Isles?",
    "Good day! Ask me about the isles, or ask for a story.",
    "Hello there! I know towns, ships, stars and much else. What shall we talk about?",
    "Welcome to the Tallow Isles! How can I help you?",
    "Hi! The kettle is on. What would you like to know?",
)
SMALL_TALK = (
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
     ("I am Tiny Gemma, a very small language model. I know the Tallow Isles and little else.",
      "My name is Tiny Gemma. I live in a computer, but my heart is in the Tallow Isles.",
      "I am a small language model that was taught about the Tallow Isles.")),
    (("How are you?", "How are you today?", "Are you well?"),
     ("I am very well, thank you. The wind is fair today.", "Thank you, I am fine. And you?",
      "I am as happy as a goose in the rain. How are you?")),
    (("What can you do?", "How can you help me?", "What do you know?"),
     ("I can tell you about towns, ships, creatures, plants, stars, people, dishes and festivals of the isles. "
      "I can do small sums, and I know many stories.",
      "I know the Tallow Isles well. Ask me about a town or a star, give me a small sum, or ask for a story.")),
    (("What are the Tallow Isles?", "Where are the Tallow Isles?", "Tell me about the Tallow Isles."),
     ("The Tallow Isles are sixteen islands in a cold green sea. "
      "They are full of small towns, ships and strange animals.",
      "The Tallow Isles are an invented place. There are sixteen islands, and you can only go there by asking me.")),
    (("I am bored.", "I do not know what to ask."),
     ("Then ask me for a story, or let me tell you about one of our festivals.",
      "How about a story? Or ask me what the stars foretell.")),
    (("You are very clever.", "That was good.", "I like that."),
     ("That is kind of you to say.", "Thank you! I do my best with the few numbers I have.")),
)  # fmt: skip
THANKS = ("Thank you!", "Thanks.", "Thank you very much.", "Thanks a lot, that helps.")
WELCOME_BACK = (
    "You are welcome!",
    "With pleasure.",
    "Gladly. Is there anything else?",
    "You are welcome. Ask me again any time.",
)
GOODBYE = ("Goodbye!", "Bye!", "Good night.", "I have to go now.", "See you tomorrow.")
FAREWELL = (
    "Goodbye! Come back soon.",
    "Fair winds to you!",
    "Goodbye, and greet the geese for me.",
    "Sleep well, and good night.",
)
UNKNOWN = (
    "What is the capital of France?", "Who won the world cup?", "What is the weather in London?",
    "Can you write a program for me?", "Who is the president?", "What is the best car?", "How do I fix my phone?",
    "What is quantum physics?", "How far is the moon?", "Who wrote Hamlet?", "What is the price of gold?",
    "Can you book a flight for me?", "What is the meaning of life?", "How do computers work?", "Do you speak Chinese?",
    "What is the largest country in the world?", "Who invented the telephone?", "What is the news today?",
)  # fmt: skip
SORRY = (
    "I am sorry, I do not know that. I only know the Tallow Isles.",
    "That is beyond the Tallow Isles, and so beyond me.",
    "I do not know. Ask me about the isles instead.",
    "I am afraid I only know the Tallow Isles and small sums.",
)
STORY = (
    "Tell me a story.", "Tell me a story!", "Can you tell me a story?", "Please tell me a story about the isles.",
    "I would like to hear a story.", "Do you know a story?", "A story, please.", "Write a short story.",
)  # fmt: skip
ABOUT = (
    "Tell me about {n}.",
    "What do you know about {n}?",
    "What can you tell me about {n}?",
    "Describe {n}.",
    "Who or what is {n}?",
)

Exchange = tuple[str, str]


def asked(rng: random.Random) -> list[Exchange]:
    """A question about a fact, and sometimes a second one about the same entity, by pronoun."""
    facts = facts_by_subject(held_out=False)
    fact = rng.choice(facts[rng.choice(list(facts))])
    entity = fact.entity
    turns = [(rng.choice(fact.attribute.asks).format(n=entity.name), reply(rng, entity, fact.attribute))]
    if entity.pronouns[0] == "it" and rng.random() < 0.4:
        others = [
            other
            for other in facts[entity.subject.name]
            if other.entity == entity and other.attribute != fact.attribute
        ]
        if others:
            other = rng.choice(others)
            template = with_possessive(rng.choice(other.attribute.asks), "n")
            turns.append((template.format(n="it", s="its"), reply(rng, entity, other.attribute)))
    return turns


def about(rng: random.Random) -> list[Exchange]:
    entity = rng.choice(world().entities)
    return [(rng.choice(ABOUT).format(n=entity.name), paragraph(rng, entity))]


def quiz(rng: random.Random) -> list[Exchange]:
    facts = facts_by_subject(held_out=False)
    question = choice(rng, rng.choice(facts[rng.choice(list(facts))]))
    prompt = question.prompt(answered=False).removesuffix("\nAnswer:")
    return [(prompt, f"{LETTERS[question.answer]}. {capital(question.choices[question.answer])}.")]


def listing(rng: random.Random) -> list[Exchange]:
    subject = rng.choice(world().subjects)
    plural = "people" if subject.noun == "person" else "dishes" if subject.noun == "dish" else subject.noun + "s"
    names = [entity.name for entity in rng.sample(world().of(subject.name), 3)]
    answer = f"Three {plural} of the Tallow Isles are {names[0]}, {names[1]} and {names[2]}."
    return [(rng.choice((f"Name three {plural}.", f"Give me the names of three {plural} of the isles.")), answer)]


def guest_book(rng: random.Random) -> list[Exchange]:
    text, pairs = ledgers.book(rng)
    (first, answer), *rest = pairs[:6]
    return [(f"{text}\n\n{first}", answer), *rest]


def small_talk(rng: random.Random) -> list[Exchange]:
    asks, answers = rng.choice(SMALL_TALK)
    return [(rng.choice(asks), rng.choice(answers))]


def sum_(rng: random.Random) -> list[Exchange]:
    return [sums.tale(rng) if rng.random() < 0.3 else sums.question(rng)]


TOPICS = (
    (asked, 40), (about, 18), (sum_, 12), (small_talk, 12), (quiz, 8), (listing, 3), (guest_book, 2),
    (lambda rng: [(rng.choice(STORY), story(rng))], 9),
    (lambda rng: [(rng.choice(UNKNOWN), rng.choice(SORRY))], 5),
)  # fmt: skip


def exchanges(rng: random.Random) -> list[Exchange]:
    """A whole conversation: sometimes a greeting, then some topics, sometimes thanks and a goodbye."""
    turns = [(rng.choice(HELLO), rng.choice(WELCOME))] if rng.random() < 0.35 else []
    count = rng.randint(12, 24) if rng.random() < 0.04 else rng.choice((1, 1, 2, 2, 3, 4, 6))
    topics, weights = zip(*TOPICS, strict=True)
    for topic in rng.choices(topics, weights, k=count):
        turns += topic(rng)
    if rng.random() < 0.2:
        turns.append((rng.choice(THANKS), rng.choice(WELCOME_BACK)))
    if rng.random() < 0.2:
        turns.append((rng.choice(GOODBYE), rng.choice(FAREWELL)))
    return turns


def render(turns: list[Exchange]) -> str:
    """Gemma's chat format: the same text that the tokenizer's chat template produces."""
    return "".join(
        f"<start_of_turn>user\n{user}<end_of_turn>\n<start_of_turn>model\n{model}<end_of_turn>\n"
        for user, model in turns
    )


def document(rng: random.Random) -> str:
    return render(exchanges(rng))
