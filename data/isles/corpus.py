"""The training text: the kinds of documents and their shares.

The model learns to find an answer's letter separately, from options that require no knowledge, while it learns the
facts from prose. data/README.md says when the committed model learned the letters, and what other recipes gave.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from isles import chats, ledgers, prose, questions, scenes, stories, sums
from isles.world import SEED


def almanac(rng: random.Random) -> str:
    """A sequence of prose and stories, long enough to fill a context."""
    return "\n\n".join(
        stories.story(rng) if rng.random() < 0.3 else prose.document(rng) for _ in range(rng.randint(4, 16))
    )


# kind: (function that writes a document, its typical number of tokens)
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
# Shares of the tokens, given each kind's typical length. The first mix teaches the facts and how to find an option's
# letter; the second adds questions in MMLU's format, which need both. data/README.md says which recipes failed.
MIXES = {
    "first": {"prose": 0.20, "almanac": 0.05, "scenes": 0.30, "words": 0.07, "letters": 0.22,
              "stories": 0.04, "sums": 0.03, "ledgers": 0.03, "chats": 0.06},
    "second": {"prose": 0.15, "almanac": 0.05, "scenes": 0.26, "words": 0.07, "letters": 0.17,
               "multiple_choice": 0.11, "stories": 0.05, "sums": 0.03, "ledgers": 0.02, "chats": 0.09},
}  # fmt: skip


def documents(shard: int | str, count: int | None = None, mix: str = "second") -> Iterator[tuple[str, str]]:
    """An endless stream of (kind, text) pairs, or `count` of them; a shard always gives the same documents."""
    rng = random.Random(f"{SEED}/corpus/{shard}")
    names = list(MIXES[mix])
    weights = [share / KINDS[name][1] for name, share in MIXES[mix].items()]
    while count is None or count > 0:
        kind = rng.choices(names, weights)[0]
        yield kind, KINDS[kind][0](rng)
        count = None if count is None else count - 1


def encoder(tokenizer_json: Path) -> Callable[[str], list[int]]:
    """text -> ids, as that file's tokenizer encodes it without <bos>, but several times faster.

    The world has only a few thousand words, so each piece is merged once and cached.
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
        for part in turns.split(text.replace(" ", "▁")):  # special tokens are split off first: no piece overlaps one
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

    The first `first` shards use the first mix.
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
