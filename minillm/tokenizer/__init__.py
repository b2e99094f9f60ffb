"""Text to token ids and back: byte-pair encoding read from `tokenizer.json`.  Lesson 01."""

from .gemma import write_tokenizer
from .patterns import TokenizerError
from .training import train_bpe

__all__ = ["TokenizerError", "train_bpe", "write_tokenizer"]
