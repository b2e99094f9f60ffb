"""The layouts of quantized checkpoints: one file for each.  Lesson 06.

What a layout's fields and tensors mean belongs here. Reading a model's weights from files (`model`) and choosing codes
(`calibration`) does not.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minillm.errors import ConfigError
from minillm.values import read_json, shown

from . import awq, compressed_tensors, gptq, modelopt
from .layout import ANY, Layout, Stored

__all__ = ["ANY", "Layout", "Stored", "read_layout"]

Configs = Mapping[str, dict[str, Any]]  # where a configuration was read -> its fields

LAYOUTS: dict[str, Callable[[Configs], Layout]] = {
    compressed_tensors.METHOD: lambda configs: compressed_tensors.CompressedTensors(next(iter(configs.values()))),
    gptq.METHOD: gptq.Gptq,
    awq.METHOD: awq.Awq,
    modelopt.METHOD: modelopt.ModelOpt,
}
# Files that hold a configuration besides config.json, or instead of it, and the method if they do not name it.
FILES = {each.FILE: each.METHOD for each in (gptq, awq, modelopt)}


def read_layout(directory: Path) -> Layout | None:
    """Return the layout of a quantized checkpoint, None for an unquantized one. Raises ConfigError, which names the
    file.
    """
    path = directory / "config.json"
    configs: dict[str, Any] = {}
    config = read_json(path, ConfigError) if path.is_file() else {}
    if (stored := config.get("quantization_config")) is not None:
        configs[str(path)] = stored
    elif (stored := config.get(compressed_tensors.OLDER_FIELD)) is not None:
        described = isinstance(stored, dict)
        configs[str(path)] = {"quant_method": compressed_tensors.METHOD} | stored if described else stored
    for name, method in FILES.items():
        if (file := directory / name).is_file():
            configs[str(file)] = {"quant_method": method} | read_json(file, ConfigError)
    return layout_of(configs) if configs else None


def layout_of(configs: Mapping[str, Any]) -> Layout:
    """Return the layout that configurations describe. configs: the file that each was read from -> its fields.

    Raises ConfigError, which names the files.
    """
    try:
        methods = {file: _method(config) for file, config in configs.items()}
        if len(set(methods.values())) > 1:
            several = " and ".join(f"{method} in {Path(file).name}" for file, method in methods.items())
            raise ConfigError(f"quant_method is {several}: remove the file that does not belong to these weights")
        short = {Path(file).name: config for file, config in configs.items()}
        return LAYOUTS[next(iter(methods.values()))](short)
    except ConfigError as error:
        raise ConfigError(f"{' and '.join(configs)}: {error}") from None


def _method(config: Any) -> str:
    if not isinstance(config, dict):
        raise ConfigError(f"quantization_config must be an object, not {shown(config)}")
    method = config.get("quant_method")
    if method == "compressed_tensors":  # as some tools spell it
        method = compressed_tensors.METHOD
    if not isinstance(method, str) or method not in LAYOUTS:
        raise ConfigError(f"quant_method {shown(method)} is not supported; supported are: {', '.join(LAYOUTS)}")
    return method
