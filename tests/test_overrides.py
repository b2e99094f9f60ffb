"""The reader's own functions in place of the engine's: those that are no operation on tensors."""

import subprocess
import sys

import pytest

import minillm
from minillm import overrides
from minillm.model.loader import EMBEDDED

WORDS = "the lighthouse of Fenwick"


@pytest.fixture(scope="module")
def tokenizer():
    return minillm.Tokenizer.from_pretrained(EMBEDDED)


def letters(symbols, ranks):
    return symbols


def test_the_readers_merge_tokenizes_and_leaves_nothing_remembered(tokenizer):
    before = tokenizer.encode(WORDS)
    with minillm.using(bpe_merge=letters) as used:
        assert overrides.replaced("bpe_merge")
        assert len(tokenizer.encode(WORDS, add_special_tokens=False)) == len(WORDS)
    assert used.calls["bpe_merge"] > 0
    assert not overrides.replaced("bpe_merge")
    assert tokenizer.encode(WORDS) == before


def test_an_unsolved_merge_leaves_the_tokens_as_they_were(tokenizer):
    def stub(symbols, ranks):
        raise minillm.NotSolvedYet("bpe_merge")

    before = tokenizer.encode(WORDS)
    with minillm.using(bpe_merge=stub) as used:
        assert tokenizer.encode(WORDS) == before
    assert used.not_solved == {"bpe_merge": "bpe_merge"}


def test_replacing_one_part_leaves_the_version_of_others():
    version = minillm.ops.on("cpu").version
    with minillm.using(bpe_merge=letters):
        assert minillm.ops.on("cpu").version == version


def test_names_are_complete_before_any_engine_is_imported():
    code = "import minillm.overrides as p; names = p.names(); assert {'bpe_merge', 'linear'} <= set(names), names"
    subprocess.run([sys.executable, "-c", code], check=True)
