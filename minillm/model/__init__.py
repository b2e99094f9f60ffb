"""The model: one decoder for all families, configured by `ModelConfig`.  Lesson 02.

The decoder, its configuration, and what reads its weights from files belong here. How a weight is stored
(`quantization`) and multiplied (`ops`) does not.
"""

from typing import TYPE_CHECKING

from minillm.lazy_imports import exports

if TYPE_CHECKING:
    from .batch import Batch
    from .config import PRESETS, ModelConfig
    from .decoder import Model
    from .loader import load_model

__all__ = ["Batch", "Model", "ModelConfig", "PRESETS", "load_model"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "Batch": "batch",
        "Model": "decoder",
        "ModelConfig": "config",
        "PRESETS": "config",
        "load_model": "loader",
    },
)
