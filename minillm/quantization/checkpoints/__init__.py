"""How quantized checkpoints are stored: one file for each layout.  Lesson 06."""

from pathlib import Path
from typing import Any

from minillm.errors import ConfigError
from minillm.values import read_json, shown

from . import compressed_tensors
from .layout import Layout, Stored

__all__ = ["Layout", "Stored", "read_layout"]

LAYOUTS = {compressed_tensors.METHOD: compressed_tensors.CompressedTensors}


def read_layout(directory: Path) -> Layout | None:
    """The layout of a quantized checkpoint, None for an unquantized one. Raises ConfigError."""
    path = directory / "config.json"
    config = read_json(path, ConfigError).get("quantization_config") if path.is_file() else None
    if config is None:
        return None
    try:
        return _layout(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _layout(config: Any) -> Layout:
    if not isinstance(config, dict):
        raise ConfigError(f"quantization_config must be an object, not {shown(config)}")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in LAYOUTS:
        raise ConfigError(
            f"quantization_config: quant_method {shown(method)} is not supported; supported are: {', '.join(LAYOUTS)}"
        )
    return LAYOUTS[method](config)
