"""A model with one damaged token: whatever sees that token has logits that are not numbers; all else is as before."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TINY_GEMMA = Path(__file__).resolve().parents[1] / "data" / "tiny-gemma"
BAD = 70  # the damaged token: no test's good prompt or output has it


def damage(directory: Path, value: float = float("nan")) -> None:
    """Make a saved model's embedding of BAD consist of `value`. Its head has numbers, and makes BAD unlikely."""
    file, path = directory / "model.safetensors", directory / "config.json"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    tensors.setdefault("lm_head.weight", embedding.clone())
    embedding[BAD] = value
    tensors["lm_head.weight"][BAD] = 0
    save_file(tensors, file, metadata={"format": "pt"})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))


def damaged_tiny_gemma(directory: Path) -> Path:
    """tiny-gemma, whose tensors are in two files, in one."""
    shutil.copytree(TINY_GEMMA, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: each for file in TINY_GEMMA.glob("*.safetensors") for name, each in load_file(file).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    damage(directory)
    return directory


def rows(count: int, length: int, vocab: int) -> list[list[int]]:
    """Prompts of different lengths, up to `length`, without BAD."""
    generator = torch.Generator().manual_seed(5)
    found = torch.randint(2, BAD, (count, length), generator=generator) % vocab
    return [row[: length - i].tolist() for i, row in enumerate(found)]
