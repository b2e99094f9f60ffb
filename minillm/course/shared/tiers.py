"""Tiers: which model a lesson runs, the embedded one on a CPU or Gemma 2B on a GPU.  Lesson 00.

MINILLM_TIER   cpu, gpu, or auto: gpu if torch sees a GPU that runs the kernels and holds Gemma 2B
MINILLM_GEMMA  the directory of Gemma 2B's weights, if they are not in Hugging Face's cache; without weights, a GPU runs
               Gemma 2B's shape with random ones
MINILLM_MODEL  another trained model to run here, on the GPU or the CPU: a name of `minillm models`, a directory. With
               MINILLM_TIER=cpu, which stands for the embedded model, it has no effect
"""

import os
from dataclasses import dataclass, field

from minillm.errors import ConfigError

from ..doctor import gemma_directory, gpu_problem


@dataclass(frozen=True)
class Tier:
    """A lesson's machine and model, for `LLM(tier.model, **tier.options)`. trained: whether its text is meaningful."""

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
        """Options of an `LLM` whose text depends on every part of the model, as that of random weights does not.

        Only such text shows whether a replaced operation changes the output.
        """
        return {"model": self.model, **self.options} if self.trained else {"device": self.device}


def full() -> bool:
    """Return whether experiments run at full length: FULL=1, as in `make demo`."""
    return os.environ.get("FULL") == "1"


def tier() -> Tier:
    """The tier of this machine, or the one that MINILLM_TIER names. Raises ConfigError."""
    import torch

    from minillm.model.loader import EMBEDDED, resolve
    from minillm.pretrained import model_name

    wanted = os.environ.get("MINILLM_TIER", "auto")
    if wanted not in ("auto", "cpu", "gpu"):
        raise ConfigError(f"MINILLM_TIER must be cpu, gpu or auto, not {wanted!r}")
    problem = gpu_problem() if torch.cuda.is_available() else "torch sees no GPU"
    if wanted == "gpu" and problem:
        raise ConfigError(f"MINILLM_TIER=gpu, but {problem}: unset it; `minillm doctor` says more")
    if wanted != "cpu" and (named := os.environ.get("MINILLM_MODEL")):
        source = resolve(named)
        if isinstance(source, str):
            raise ConfigError(f"MINILLM_MODEL must name a trained model, not the shape {source}: see `minillm models`")
        kind, device = ("cpu", "cpu") if problem else ("gpu", "cuda")
        return Tier(kind, str(source), f"{model_name(source)}, trained", True, {"device": device})
    if wanted == "cpu" or problem:
        return Tier("cpu", None, "tiny-gemma, trained", True, {"device": "cpu"})
    if directory := gemma_directory():
        return Tier("gpu", str(directory), "Gemma 2B, trained", True, {"device": "cuda"})
    label = "Gemma 2B's shape, random weights: what it says means nothing"
    # Any tokenizer will do for meaningless text; all ids of the embedded one are in Gemma's vocabulary.
    options = {"device": "cuda", "load_format": "dummy", "tokenizer": EMBEDDED}
    return Tier("gpu", "gemma-2b", label, False, options)
