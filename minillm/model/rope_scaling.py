"""Rotary position embeddings as `config.json` describes them: the base of their frequencies and how they are scaled.

Lesson 02.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minillm.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Scales rotary frequencies for contexts longer than the trained one.  Lesson 02.

    "linear" divides all frequencies by `factor` (Chen et al. 2023, section 3.2); "llama3" only the low ones (Meta's
    reference code for Llama 3.1, `apply_scaling`), which the other three numbers delimit.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope scaling needs a high_freq_factor above low_freq_factor={self.low_freq_factor}, not "
                f"{self.high_freq_factor}"
            )

    def scaled(self, frequencies: "Tensor") -> "Tensor":
        """Lower frequencies, in radians a token, so that long contexts keep the trained range of angles: like them."""
        if self.rope_type == "linear":
            return frequencies / self.factor
        # Llama 3: divide the frequencies of long waves by `factor`, keep those of short waves, interpolate in between.
        trained, waves = self.original_max_position_embeddings, 2 * math.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        blend = (trained / waves - low) / (high - low)
        between = (1 - blend) * frequencies / self.factor + blend * frequencies
        stretched = (frequencies / self.factor).where(waves > trained / low, between)
        return frequencies.where(waves < trained / high, stretched)


def read_rope(
    raw: dict[str, Any], layers: str = "full_attention", theta: str = "rope_theta"
) -> tuple[float, RopeScaling | None]:
    """Base and scaling. transformers 5 writes both to `rope_parameters`; 4 wrote them to two fields.

    Gemma 3 has a pair for each kind of layer; transformers 4 wrote the local base to a third field, without scaling.
    """
    rope = raw.get("rope_parameters") or {}
    if "sliding_attention" in rope or "full_attention" in rope:
        rope = rope.get(layers) or {}
    elif layers == "full_attention":
        rope = rope or raw.get("rope_scaling") or {}
    rope = {name: value for name, value in rope.items() if value is not None}
    base = float(rope.get("rope_theta", raw.get(theta, 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base, None
    if kind not in ("linear", "llama3"):
        raise ConfigError(f"rope scaling {kind!r} is not supported; supported are: default, linear, llama3")
    factor = float(rope["factor"])
    if kind == "linear":
        return base, RopeScaling(kind, factor)
    trained = rope.get("original_max_position_embeddings", raw["max_position_embeddings"])
    return base, RopeScaling(kind, factor, float(rope["low_freq_factor"]), float(rope["high_freq_factor"]), trained)
