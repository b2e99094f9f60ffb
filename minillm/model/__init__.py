"""The model: one decoder for all families, configured by `ModelConfig`.  Lesson 02."""

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
