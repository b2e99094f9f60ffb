"""Prompt lookup: the newest earlier occurrence of the longest known n-gram says what comes next."""

import random

import numpy as np
import pytest

from minillm.speculation import Asked, NgramProposer
from minillm.speculation.ngram import IN_BULK, SIZES, NgramIndex
from tests.chance import SEED


def looked_up(tokens: list[int], most: int) -> list[int]:
    """The same by search, without an index."""
    for size in SIZES:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                drafts = tokens[end : end + most]
                while len(drafts) < most:
                    drafts.append(drafts[len(drafts) - (len(tokens) - end)])
                return drafts
    return []


def asked(tokens: list[int], most: int = 5, request: str = "r") -> Asked:
    return Asked(request, np.array(tokens, np.int32), most)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4, 1]),  # the newest
        ([9, 9, 5, 8, 9, 6, 9, 9, 5, 8, 9], [6, 9, 9, 5, 8]),  # the longest
        ([7, 7], []),  # an n-gram does not follow itself
        ([7, 7, 7], [7, 7, 7, 7, 7]),
        ([5], []),
        ([1, 2, 3, 4], []),
    ],
)
def test_drafts_are_what_followed(tokens, expected):
    assert NgramProposer().propose([asked(tokens)]) == [expected] == [looked_up(tokens, 5)]


@pytest.mark.explore
def test_an_index_that_grows_finds_what_a_search_finds():
    """However many tokens come between two questions: a few are hashed one by one, many at once."""
    rng = random.Random(SEED + 4)
    found = 0
    for _ in range(40):
        proposer, alphabet = NgramProposer(), rng.choice([2, 5, 30])
        tokens = [rng.randrange(alphabet) for _ in range(rng.randint(1, 60))]
        for _ in range(12):
            expected = looked_up(tokens, 6)
            assert proposer.propose([asked(tokens, 6)]) == [expected]
            found += bool(expected)
            tokens = tokens + [rng.randrange(alphabet) for _ in range(rng.choice([1, 2, 7, IN_BULK, 2 * IN_BULK]))]
    assert found > 300


def test_an_index_that_learns_bit_by_bit_knows_the_same():
    tokens = np.random.default_rng(SEED).integers(4, size=300, dtype=np.int32)
    at_once, in_parts = NgramIndex(), NgramIndex()
    at_once.continuation(tokens, 5)
    left = []
    while behind := in_parts.behind(len(tokens)):
        left.append(behind)
        in_parts.catch_up(tokens, 50)
    assert left == [299, 249, 199, 149, 99, 49]
    assert in_parts.continuation(tokens, 5) == at_once.continuation(tokens, 5)
    assert (in_parts._seen, in_parts._after) == (at_once._seen, at_once._after)


def test_ids_of_a_large_vocabulary_are_told_apart():
    tokens = [262_143, 131_072, 5, 262_142, 131_072, 6, 262_143, 131_072]
    assert NgramProposer().propose([asked(tokens, 1)]) == [[5]]


def test_each_request_has_its_own_index_until_it_ends():
    proposer = NgramProposer()
    assert proposer.propose([asked([1, 2, 3, 1, 2], 1, "a"), asked([1, 2], 1, "b")]) == [[3], []]
    proposer.forget("a")
    proposer.forget("never asked")
    assert set(proposer._indexes) == {"b"}
