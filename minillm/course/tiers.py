"""Which model a lesson runs on: the embedded one on a CPU, Gemma 2B on a GPU.  Lesson 00.

MINILLM_TIER   cpu, gpu, or auto: gpu where torch sees one
MINILLM_GEMMA  the directory of Gemma 2B's weights, where they are not in Hugging Face's cache; without any, a GPU runs
               Gemma 2B's shape with random weights
"""

import os
from dataclasses import dataclass, field

from minillm.errors import ConfigError

from .doctor import gemma_directory


@dataclass(frozen=True)
class Tier:
    """Where a lesson runs: `LLM(tier.model, **tier.options)`. `trained` says whether its text means anything."""

    name: str  # "cpu" or "gpu"
    model: str | None
    label: str
    trained: bool
    options: dict = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cuda" if self.name == "gpu" else "cpu"

    @property
    def words(self) -> dict:
        """What to give `LLM` for words that depend on every part of the model: random weights repeat themselves.

        Whether a replaced operation says the same, or something else, can be seen on these alone.
        """
        return {"model": self.model, **self.options} if self.trained else {"device": self.device}


def full() -> bool:
    """Whether experiments run at their full length (FULL=1, as in `make demo`) instead of small."""
    return os.environ.get("FULL") == "1"


def tier() -> Tier:
    """The tier of this machine, or the one that MINILLM_TIER names. Raises ConfigError."""
    import torch

    from minillm.model.loader import EMBEDDED

    wanted = os.environ.get("MINILLM_TIER", "auto")
    if wanted not in ("auto", "cpu", "gpu"):
        raise ConfigError(f"MINILLM_TIER must be cpu, gpu or auto, not {wanted!r}")
    if wanted == "gpu" and not torch.cuda.is_available():
        raise ConfigError("MINILLM_TIER=gpu, but torch sees no GPU here: `minillm doctor` says why")
    if wanted == "cpu" or not torch.cuda.is_available():
        return Tier("cpu", None, "tiny-gemma, trained", True, {"device": "cpu"})
    if directory := gemma_directory():
        return Tier("gpu", str(directory), "Gemma 2B, trained", True, {"device": "cuda"})
    label = "Gemma 2B's shape, random weights: what it says means nothing"
    # Any tokenizer will do for text that means nothing; the embedded one's ids are all in Gemma's vocabulary.
    options = {"device": "cuda", "load_format": "dummy", "tokenizer": EMBEDDED}
    return Tier("gpu", "gemma-2b", label, False, options)
