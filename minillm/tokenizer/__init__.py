"""Text to token ids and back: byte-pair encoding read from `tokenizer.json`.  Lesson 01.

Every component of that file that a supported model uses belongs here. Chat requests and stop strings do not (`engine`).
"""

from .bpe import merge
from .detokenizer import StreamingDetokenizer
from .gemma import write_tokenizer
from .patterns import TokenizerError
from .tokenizer import Tokenizer
from .training import train_bpe

__all__ = ["StreamingDetokenizer", "Tokenizer", "TokenizerError", "merge", "train_bpe", "write_tokenizer"]
