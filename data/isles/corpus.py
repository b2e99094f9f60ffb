"""The training text: which kinds of document there are, and how much of each.

The letter of an answer is learned on its own, from options that need no knowledge, while the facts are learned from
prose. In the committed model's run letters stayed hard for 90 million tokens and were easy after 145; data/README.md
tells what other recipes gave.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from isles import chats, ledgers, prose, questions, scenes, stories, sums
from isles.world import SEED


def almanac(rng: random.Random) -> str:
    """Prose and stories one after the other, long enough to fill a context."""
    return "\n\n".join(
        stories.story(rng) if rng.random() < 0.3 else prose.document(rng) for _ in range(rng.randint(4, 16))
    )


# kind: (how to write one, tokens that one usually has)
KINDS = {
    "prose": (prose.document, 61),
    "almanac": (almanac, 940),
    "scenes": (scenes.document, 68),
    "words": (questions.words, 66),
    "letters": (questions.letters, 155),
    "multiple_choice": (questions.multiple_choice, 167),
    "stories": (stories.story, 173),
    "sums": (sums.document, 130),
    "ledgers": (ledgers.document, 560),
    "chats": (chats.document, 195),
}
# Shares of the tokens, as far as a kind's usual length holds.  First what there is to know, and how the letter of an
# option is found; then also questions in MMLU's form that need both.  An earlier recipe, a billion tokens with letters
# that weighed five times a word, learned the questions it met by heart and had 60 % of the held-out ones right; this
# one has 89 %.  One mix from the start, a quarter or more of it multiple choice, was at chance after 105 to 131 million
# tokens.
MIXES = {
    "first": {"prose": 0.20, "almanac": 0.05, "scenes": 0.30, "words": 0.07, "letters": 0.22,
              "stories": 0.04, "sums": 0.03, "ledgers": 0.03, "chats": 0.06},
    "second": {"prose": 0.15, "almanac": 0.05, "scenes": 0.26, "words": 0.07, "letters": 0.17,
               "multiple_choice": 0.11, "stories": 0.05, "sums": 0.03, "ledgers": 0.02, "chats": 0.09},
}  # fmt: skip


def documents(shard: int | str, count: int | None = None, mix: str = "second") -> Iterator[tuple[str, str]]:
    """(kind, text) pairs without end, or `count` of them; the same shard always gives the same documents."""
    rng = random.Random(f"{SEED}/corpus/{shard}")
    names = list(MIXES[mix])
    weights = [share / KINDS[name][1] for name, share in MIXES[mix].items()]
    while count is None or count > 0:
        kind = rng.choices(names, weights)[0]
        yield kind, KINDS[kind][0](rng)
        count = None if count is None else count - 1


def encoder(tokenizer_json: Path) -> Callable[[str], list[int]]:
    """text -> ids, as the tokenizer of that file encodes it without <bos>, several times faster.

    A world of a few thousand words needs each of its pieces merged only once; the rest is looking them up.
    """
    import regex
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    split = json.loads(tokenizer_json.read_text(encoding="utf-8"))["pre_tokenizer"]["pattern"]["Regex"]
    pieces = regex.compile(split, regex.V1)
    turns = regex.compile("(<start_of_turn>|<end_of_turn>)")
    ids: dict[str, list[int]] = {}

    def encode(text: str) -> list[int]:
        out: list[int] = []
        for part in turns.split(text.replace(" ", "▁")):  # special tokens come first: no piece reaches into one
            if turns.fullmatch(part):
                out.append(tokenizer.token_to_id(part))
                continue
            for piece in pieces.findall(part):
                if piece not in ids:
                    ids[piece] = [token.id for token in tokenizer.model.tokenize(piece)]
                out += ids[piece]
        return out

    return encode


def tokens(shard: int, tokenizer_json: Path, count: int, first: int):
    """`count` token ids of a shard as a uint16 array: documents between <bos> and <eos>, end to end.

    The first `first` shards are of the first mix.
    """
    encode = encoder(tokenizer_json)
    vocab = json.loads(tokenizer_json.read_text(encoding="utf-8"))["model"]["vocab"]
    bos, eos = vocab["<bos>"], vocab["<eos>"]
    out: list[int] = []
    for _, text in documents(shard, mix="first" if shard < first else "second"):
        out.append(bos)
        out += encode(text)
        out.append(eos)
        if len(out) >= count:
            return np.array(out[:count], dtype=np.uint16)
