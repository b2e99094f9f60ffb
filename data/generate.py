"""Generate everything in this folder that derives from the invented world, except the model: `python data/generate.py`.

    questions/{dev,asked,test}.jsonl   multiple choice in MMLU's columns
    text/held_out.txt                  documents unseen in training, for perplexity
    text/calibration.txt               documents as in training, to calibrate quantization
    traces/conversation.jsonl          a traffic trace
    tiny-gemma/tokenizer*.json         with --tokenizer: the vocabulary for training the model (takes a minute)

The same call always writes the same bytes; a test compares the committed files with this script's output.
"""

import argparse
import json
from pathlib import Path

import traces
from isles import corpus, questions
from isles.world import world

DATA = Path(__file__).resolve().parent
VOCAB_SIZE = 4096
TOKENIZER_DOCUMENTS = 24_000
INDEX_READINGS = 180
HELD_OUT_DOCUMENTS = 400  # about 130 kB
CALIBRATION_DOCUMENTS = 400  # about 150 kB


def write_questions(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for split, choices in questions.question_sets().items():
        lines = (json.dumps(choice.row(), ensure_ascii=False) + "\n" for choice in choices)
        (directory / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def held_out_text(count: int = HELD_OUT_DOCUMENTS) -> str:
    """A sequence of prose and stories; the shard's name keeps them separate from the training shards."""
    kinds = ("prose", "stories")
    texts = (text.strip() for kind, text in corpus.documents("held-out") if kind in kinds)
    return "\n\n".join(next(texts) for _ in range(count)) + "\n"


def calibration_text(count: int = CALIBRATION_DOCUMENTS) -> str:
    """A sequence of documents of all kinds, in training's shares, from a shard that no training read."""
    return "\n\n".join(text.strip() for _, text in corpus.documents("calibration", count)) + "\n"


def train_tokenizer(directory: Path, documents: int = TOKENIZER_DOCUMENTS) -> None:
    from minillm.tokenizer import train_bpe, write_tokenizer

    turns = ("<start_of_turn>", "<end_of_turn>")

    def plain(text: str) -> str:
        for turn in turns:  # special tokens are never built from other tokens
            text = text.replace(turn, "\n")
        return text

    texts = [plain(text) for _, text in corpus.documents("tokenizer", documents)]
    # An index of names, repeated many times: a fact is easier to look up under one token than under two.
    texts += [" " + " ".join(entity.name for entity in world().entities)] * INDEX_READINGS
    vocab, merges = train_bpe(texts, VOCAB_SIZE)
    write_tokenizer(directory, vocab, merges)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA, help="folder to write into (default: this one)")
    parser.add_argument(
        "--tokenizer", action="store_true", help="train the tokenizer too; a model works only with its own tokenizer"
    )
    options = parser.parse_args()
    write_questions(options.out / "questions")
    (options.out / "text").mkdir(parents=True, exist_ok=True)
    (options.out / "text" / "held_out.txt").write_text(held_out_text(), encoding="utf-8")
    (options.out / "text" / "calibration.txt").write_text(calibration_text(), encoding="utf-8")
    traces.write(options.out / "traces" / "conversation.jsonl")
    if options.tokenizer:
        train_tokenizer(options.out / "tiny-gemma")


if __name__ == "__main__":
    main()
