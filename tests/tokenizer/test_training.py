"""BPE training learns the merges of its definition, and the files it writes give the same ids everywhere."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import CORPUS, unicode_text

from minillm.tokenizer import Tokenizer, TokenizerError, train_bpe, write_tokenizer
from minillm.tokenizer.gemma import BYTE_TOKENS, SPECIAL_TOKENS
from minillm.tokenizer.training import join_pair
from tests.chance import examples


def train_by_counting_again(words, steps):
    """The definition: count all pairs, merge the most frequent one (ties in sort order), and repeat."""
    words = [(list(word), count) for word, count in Counter(words).items()]
    merges = []
    for _ in range(steps):
        counts = Counter()
        for symbols, count in words:
            for pair in zip(symbols, symbols[1:], strict=False):
                counts[pair] += count
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        words = [(join_pair(symbols, *best), count) for symbols, count in words]
    return merges


@examples(200)
@given(words=st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=12))
def test_incremental_counting_learns_the_same_merges_as_recounting(words):
    _, merges = train_bpe(words, 10_000, split_pattern=".+")
    assert merges == train_by_counting_again(words, 10_000)


def test_the_vocabulary_is_special_tokens_bytes_characters_and_merges():
    vocab, merges = train_bpe(CORPUS, 500)
    tokens = sorted(vocab, key=vocab.get)
    assert list(vocab.values()) == list(range(500))
    assert (
        tuple(tokens[:6]) == SPECIAL_TOKENS == ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
    )
    assert tuple(tokens[6:262]) == BYTE_TOKENS
    assert tokens[-1] == "".join(merges[-1])
    assert train_bpe(reversed(CORPUS), 500) == (vocab, merges)


def test_no_token_crosses_a_newline_or_merges_digits():
    text = ["Which is dry?\nA. sea\nAnswer: D\n\nWhich is wet? 1984 1984 1984"] * 50
    _, merges = train_bpe(text, 500)
    learned = {left + right for left, right in merges}
    assert "\n\n" in learned
    assert not [token for token in learned if "\n" in token.strip("\n") or token != token.strip("\n") != ""]
    assert not [token for token in learned if any(map(str.isdigit, token))]
    _, merges = train_bpe(text, 500, split_pattern=r"▁?[^▁]+")
    assert any("D\n\nW" in left + right for left, right in merges), (
        "splitting on spaces alone would lose the answer letter"
    )


def test_rare_characters_use_byte_tokens():
    vocab, _ = train_bpe(["aaaabbbcc d"], 400, max_characters=3)
    assert {"a", "b", "c"} <= vocab.keys()
    assert "d" not in vocab


def test_a_vocabulary_size_that_is_too_small_is_rejected():
    with pytest.raises(
        TokenizerError, match="vocab_size 200 is too small: 6 special tokens, 256 bytes and 2 characters"
    ):
        train_bpe(["ab"], 200)


def test_writing_without_the_special_tokens_is_rejected(tmp_path):
    vocab, merges = train_bpe(["ab"], 300, special_tokens=["<pad>"])
    with pytest.raises(TokenizerError, match="lacks <eos>, <bos>, <unk>"):
        write_tokenizer(tmp_path, vocab, merges)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("written")
    write_tokenizer(directory, *train_bpe(CORPUS, 540))
    # The model type determines which tokenizer class transformers prefers.
    (directory / "config.json").write_text(json.dumps({"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}))
    return Tokenizer.from_pretrained(directory), transformers.AutoTokenizer.from_pretrained(directory)


@examples(200)
@given(text=unicode_text())
def test_transformers_reads_the_written_file_and_gives_the_same_ids(written, text):
    ours, theirs = written
    ids = theirs(text)["input_ids"]
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_transformers_agrees_on_the_special_ids(written):
    ours, theirs = written
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
        len(theirs),
    )
    assert theirs.pad_token_id == ours.id("<pad>") == 0


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("roles", [["user"], ["user", "assistant"], ["system", "user", "assistant", "user"]])
def test_transformers_renders_the_same_chat(written, roles, add_generation_prompt):
    ours, theirs = written
    messages = [{"role": role, "content": f" line {n}\n  of <{role}> "} for n, role in enumerate(roles)]
    prompt = ours.apply_chat_template(messages, add_generation_prompt)
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    assert prompt == theirs.apply_chat_template(messages, **options)
