"""The tokenizer files and random text that these tests generate."""

import json
import unicodedata
from functools import cache, partial
from pathlib import Path

import regex
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from minillm.tokenizer import train_bpe, write_tokenizer

CORPUS = [
    "The river Ama runs past the old mill, and the miller's daughter doesn't swim in it.",
    "Which of these is dry?\nA. the sea\nB. the desert\nAnswer: B\n\nWhich of these is wet?\n\n\nA. rain",
    "In 1984 there were 365 days; 12 + 30 = 42, and 3.14159 is not 22/7.",
    "Größe, naïve café, Ελληνικά γράμματα, русские буквы, עברית, العربية, हिन्दी, 日本語の文, 한국어",
    "def f(x):\n    return x  *  2\t# twice\r\n        pass   🎉🎉 👍🏽",
] * 3

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def edit(directory: Path, change) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def gemma(directory: Path) -> None:
    """The embedded model's layout: a regex splits text into words."""
    write_tokenizer(directory, *train_bpe(CORPUS, 540))


def gemma_whole(directory: Path) -> None:
    """Gemma 1 and 2: no split at all (a Split on spaces already replaced), added tokens for runs of white space."""
    write_tokenizer(directory, *train_bpe(CORPUS, 700, split_pattern=r"▁+[^▁]*|[^▁]+"), split_pattern=None)

    def change(file):
        vocab = file["model"]["vocab"]
        split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        file["pre_tokenizer"] = split
        for content in ["\n\n", "\n\n\n", "\t\t", "▁▁", "▁▁▁", "<table>", "<unused0>"]:
            flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
            file["added_tokens"].append({"id": vocab.setdefault(content, len(vocab)), "content": content, **flags})

    edit(directory, change)


def llama2(directory: Path) -> None:
    """The older layout: "▁" is prepended to the text, merges are strings, a Strip removes the first space."""
    gemma_whole(directory)

    def change(file):
        prepend = {"type": "Prepend", "prepend": "▁"}
        file["normalizer"] = {"type": "Sequence", "normalizers": [prepend, file["normalizer"]]}
        file["pre_tokenizer"] = None
        file["model"]["merges"] = [" ".join(pair) for pair in file["model"]["merges"]]
        file["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})

    edit(directory, change)


def metaspace(directory: Path) -> None:
    """A Metaspace pre-tokenizer instead of a normalizer; unknown characters fuse into <unk>, without byte fallback."""
    gemma(directory)

    def change(file):
        space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
        file["normalizer"] = {"type": "NFC"}
        file["pre_tokenizer"] = file["decoder"] = space
        file["model"]["byte_fallback"] = False

    edit(directory, change)


def llama3(directory: Path) -> None:
    """Byte-level characters, a regex with contractions, and whole words of the vocabulary before any merge."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Words that merges cannot form: only ignore_merges finds them.
    file = json.loads(tokenizer.to_str())
    vocab = file["model"]["vocab"]
    for word in ("Ġxylophone", "zzyzx", "Ã©Ã©"):
        vocab[word] = len(vocab)
    file["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(file))
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens(special)
    bos = (special[0], tokenizer.token_to_id(special[0]))
    template = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": {"content": special[0]},
        "eos_token": special[4],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


LAYOUTS = {make.__name__: make for make in (gemma, gemma_whole, llama2, metaspace, llama3)}

_SNIPPETS = [
    *["<bos>", "<eos>", "<pad>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<0x41>", "<table>", "<unused0>"],
    *["<|begin_of_text|>", "<|eot_id|>", "<|end_header_id|>", "<start_of_turn", "end_of_turn>"],
    *[
        "\n",
        "\n\n",
        "\n\n\n\n",
        "\r\n",
        "\t",
        "\t\t\t",
        " ",
        "  ",
        "     ",
        "▁",
        "▁▁",
        "▁▁▁",
        "\x00",
        "\x1f",
        "\x85",
        "\u2028",
    ],
    *[
        "e\u0301",
        "é",
        "\u0301",
        "ﬁ",
        "क्षि",
        "각",
        "각",
        "👩\u200d👩\u200d👧",
        "👍🏽",
        "🇩🇪",
        "\ufe0f",
        "\u200d",
        "\ufeff",
        "\ufffd",
    ],
    *[
        "'s",
        "'S",
        "'ſ",
        "don't",
        "'LL",
        " xylophone",
        "zzyzx",
        "éé",
        "12345",
        "²",
        "Ⅻ",
        "٣٤",
        "a" * 300,
        "日本" * 80,
        "-" * 90,
    ],
    *" ".join(CORPUS[:5]).split(" "),
]


# Unassigned in Python's Unicode tables; newer tables, in `regex` or the library, may classify some as letters.
UNASSIGNED = ("Cs", "Cn")
CHARACTERS = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) not in UNASSIGNED]


@cache
def known_differently() -> set[str]:
    """Characters that the library's normalizers treat differently from Python and `regex`.

    Each uses Unicode tables of a different version. In an older table, a newer character is not an accent and has no
    decomposition and no combining class, so marks around it keep their order. It must be tested in context.
    """
    different = set()

    def compare(theirs, ours, texts: list[str]) -> None:
        """Texts of three characters, each testing the second one."""
        pairs = (normalize("\n".join(texts)).split("\n") for normalize in (theirs.normalize_str, ours))
        different.update(text[1] for text, a, b in zip(texts, *pairs, strict=True) if a != b)

    marks: dict[int, str] = {}  # one character of each combining class, from old tables
    for c in CHARACTERS:
        if unicodedata.combining(c) == unicodedata.ucd_3_2_0.combining(c) > 0:
            marks.setdefault(unicodedata.combining(c), c)
    last, first = marks[max(marks)], marks[min(marks)]  # a character without a class keeps them from being reordered
    texts = [f"{last}{c}{first}" for c in CHARACTERS if c != "\n" and unicodedata.category(c) != "Co"]
    texts += [f"a{c}{mark}" for c in CHARACTERS if unicodedata.combining(c) for mark in marks.values()]
    compare(normalizers.StripAccents(), partial(regex.sub, r"\p{M}", ""), texts)
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        compare(getattr(normalizers, form)(), partial(unicodedata.normalize, form), texts)
    # The parts of characters that only one of them composes.
    return different.union(*(unicodedata.normalize("NFD", c) for c in different))


def unicode_text() -> st.SearchStrategy[str]:
    """Any UTF-8 text of characters that all treat alike, with more of those that often break tokenizers."""
    known = st.characters(exclude_categories=UNASSIGNED, exclude_characters=known_differently())
    texts = st.text(known, max_size=12)
    return st.lists(texts | st.sampled_from(_SNIPPETS), max_size=14).map("".join)
