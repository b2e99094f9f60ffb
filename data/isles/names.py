"""Children's names for the stories, the sums and the inn's guest book; no question is about them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Child:
    name: str
    they: str
    them: str
    their: str
    kind: str


GIRLS = "Mina Pia Lotta Juna Rosie Della Tess Kiki Anouk Birdie Mabel Sunny Effie Lulu Zita Maya Nell Dot Ivy Poppy"
BOYS = "Pip Timo Jonas Kit Ned Rollo Benno Theo Finn Luca Milo Jack Sam Toby Wim Leo Gus Anton Dan Robin"

CHILDREN = tuple(
    [Child(name, "she", "her", "her", "girl") for name in GIRLS.split()]
    + [Child(name, "he", "him", "his", "boy") for name in BOYS.split()]
)
