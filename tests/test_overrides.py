"""User-supplied functions that replace parts of the engine other than tensor operations."""

import subprocess
import sys

import pytest

import minillm
from minillm import overrides
from minillm.model.loader import EMBEDDED

pytestmark = pytest.mark.key

WORDS = "the lighthouse of Fenwick"


@pytest.fixture(scope="module")
def tokenizer():
    return minillm.Tokenizer.from_pretrained(EMBEDDED)


def letters(symbols, ranks):
    return symbols


def test_a_user_supplied_merge_tokenizes_and_leaves_nothing_cached(tokenizer):
    before = tokenizer.encode(WORDS)
    with minillm.using(bpe_merge=letters) as used:
        assert overrides.replaced("bpe_merge")
        assert len(tokenizer.encode(WORDS, add_special_tokens=False)) == len(WORDS)
    assert used.calls["bpe_merge"] > 0
    assert not overrides.replaced("bpe_merge")
    assert tokenizer.encode(WORDS) == before


def test_an_unsolved_merge_falls_back_to_the_engines_own(tokenizer):
    def stub(symbols, ranks):
        raise minillm.NotSolvedYet("bpe_merge")

    before = tokenizer.encode(WORDS)
    with minillm.using(bpe_merge=stub) as used:
        assert tokenizer.encode(WORDS) == before
    assert used.not_solved == {"bpe_merge": "bpe_merge"}


def test_replacing_the_merge_leaves_the_version_of_the_operations_unchanged():
    version = minillm.ops.on("cpu").version
    with minillm.using(bpe_merge=letters):
        assert minillm.ops.on("cpu").version == version


def test_names_are_complete_before_the_engine_is_imported():
    code = "import minillm.overrides as p; names = p.names(); assert {'bpe_merge', 'linear'} <= set(names), names"
    subprocess.run([sys.executable, "-c", code], check=True)
