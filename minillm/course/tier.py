"""Which model a lesson runs on: the embedded one on a CPU, Gemma 2B on a GPU.  Lesson 00.

MINILLM_TIER   cpu, gpu, or auto: gpu where torch sees one
MINILLM_MODEL  on a GPU: the directory of the real weights; without it Gemma 2B's shape gets random ones
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from ..config import ConfigError


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


def tier() -> Tier:
    """The tier of this machine, or the one that MINILLM_TIER names. Raises ConfigError."""
    import torch

    wanted = os.environ.get("MINILLM_TIER", "auto")
    if wanted not in ("auto", "cpu", "gpu"):
        raise ConfigError(f"MINILLM_TIER must be cpu, gpu or auto, not {wanted!r}")
    if wanted == "gpu" and not torch.cuda.is_available():
        raise ConfigError("MINILLM_TIER=gpu, but torch sees no GPU here: `minillm doctor` says why")
    if wanted == "cpu" or not torch.cuda.is_available():
        return Tier("cpu", None, "tiny-gemma, trained", True, {"device": "cpu"})
    directory = os.environ.get("MINILLM_MODEL")
    if directory:
        return Tier("gpu", directory, f"{Path(directory).name}, trained", True, {"device": "cuda"})
    options = {"device": "cuda", "load_format": "dummy"}
    return Tier("gpu", "gemma-2b", "Gemma 2B's shape, random weights: its text means nothing", False, options)
