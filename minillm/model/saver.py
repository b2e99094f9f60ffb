"""Save a model as a directory in Hugging Face's layout, its weights quantized or not.  Lesson 06."""

import contextlib
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from minillm.errors import ConfigError
from minillm.pretrained.cache import ORIGIN
from minillm.quantization import Dense, Format, Int4, Sparse, weight_only
from minillm.quantization.checkpoints import compressed_tensors
from minillm.values import read_json

from .decoder import Model
from .loader import named_norms
from .modules import HEAD, modules

# Other programs refuse an unknown type of model. They would ignore an unknown field, and compute something else.
ROTATED = "minillm-rotated"
COPIED_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "chat_template*",
    "*.model",
    "LICENSE*",
    ORIGIN,
)


def save_model(model: Model, source: Path, directory: Path, dtype: torch.dtype | None = None) -> int:
    """Write a model's parameters and configuration. Returns the bytes of the parameters.

    source     the directory of the model that it was made from: its configuration and tokenizer are copied
    directory  where to write; it must not exist, or be empty
    dtype      of norms, biases, unquantized and pruned weights and the scales of groups; default: the model's

    Quantized weights are written in the layout of compressed-tensors. Raises ConfigError before any work,
    and OSError if the disk is full.
    """
    if model.parallel.size > 1:
        raise ConfigError("this is one GPU's part of a model: load the whole model on one device to save it")
    directory = check_free(directory)
    dtype = dtype or model.dtype
    config = _config(model, source, dtype)
    tensors = {name: _owned(tensor) for name, tensor in _tensors(model, dtype).items()}
    existed = directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        _write(tensors, config, source, directory)
    except BaseException:
        if not existed:
            with contextlib.suppress(OSError):  # the first error is the one to report
                directory.rmdir()
        raise
    return sum(tensor.nbytes for tensor in tensors.values())


def check_free(directory: Path) -> Path:
    """Return the absolute path of a directory to write, symbolic links followed.

    Raises ConfigError unless it can be written without overwriting anything.
    """
    try:
        path = directory.expanduser().resolve()
        if path.is_symlink():  # still: a loop of links, for which Python 3.13 raises nothing
            raise OSError("its symbolic links form a loop")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{directory} exists and is not an empty directory: choose another, or remove it")
        existing = next(each for each in (path, *path.parents) if each.exists())
        with tempfile.TemporaryDirectory(prefix=".minillm-", dir=existing):
            pass
    except ConfigError:  # which is a ValueError, too
        raise
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a name with a null byte
        raise ConfigError(f"{directory} cannot be written: {error}") from None
    return path


def _formats(model: Model) -> dict[str, Format]:
    """Return the format of each module. A tied head with quantized inputs is a module too, which has no tensors of its
    own.
    """
    weights = model.addressed()
    formats = {part.name: weights[address].format for address, parts in modules(model.config).items() for part in parts}
    if model.head is model.embedding and model.head.activations is not None:
        (embedding,) = modules(model.config)["head"]
        formats |= {embedding.name: weight_only(model.head.format), HEAD: model.head.format}
    return formats


def _tensors(model: Model, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all tensors by their names in the checkpoint. They may share storage with the model."""
    tensors: dict[str, Tensor] = {}
    weights = model.addressed()
    for address, parts in modules(model.config).items():
        weight = weights[address]
        for module in parts:
            span = slice(module.rows.start, module.rows.stop)
            codes = weight.read(module.rows)
            if codes is None:
                stored = {"weight": weight.dequantize()[span].to(dtype)}
            else:
                if isinstance(weight.format, Sparse):
                    codes = replace(codes, codes=codes.codes.to(dtype))
                if isinstance(weight.format, Int4):
                    codes = replace(codes, scales=codes.scales.to(dtype))
                stored = compressed_tensors.write(module.name, codes, weight.format)
            if codes is not None and weight.input_scale is not None:
                stored["input_scale"] = weight.input_scale.clone()  # modules share it
            if weight.bias is not None:
                stored["bias"] = weight.bias[span].to(dtype)
            tensors |= {f"{module.name}.{name}": tensor for name, tensor in stored.items()}
    for name, norm in named_norms(model).items():
        tensors[name] = (norm.double() - model.config.norm_offset).to(dtype)
    return tensors


def _owned(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor on the CPU with a storage of its own, as safetensors needs; copied only if
    necessary.
    """
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _config(model: Model, source: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Return what config.json will hold. Raises ConfigError for a format that the layout does not have."""
    config = read_json(source / "config.json", ConfigError)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    config["tie_word_embeddings"] = model.config.tie_word_embeddings  # the file may have had a head that config denied
    config.pop("quantization_config", None)
    if model.config.rotations:
        config["rotations"] = list(model.config.rotations)
        config["model_type"] = ROTATED
    formats = _formats(model)
    if any(each != Dense() for each in formats.values()):
        config["quantization_config"] = compressed_tensors.describe(formats)
    return config


def _write(tensors: dict[str, Tensor], config: dict[str, Any], source: Path, directory: Path) -> None:
    """Write all files to a temporary directory, then move them; config.json last.

    An interrupted call never leaves a partial model, because a directory without config.json is not a model.
    """
    with tempfile.TemporaryDirectory(prefix=".minillm-", dir=directory) as temporary:
        staging = Path(temporary)
        file = staging / "model.safetensors"
        file.touch()
        mode = file.stat().st_mode  # as the umask says; safetensors may set another
        try:
            save_file(tensors, file, metadata={"format": "pt"})
        except SafetensorError as error:  # such as a full disk
            raise OSError(f"{directory} cannot be written: {error}") from error
        file.chmod(mode & 0o777)
        for pattern in COPIED_FILES:
            for each in sorted(source.glob(pattern)):
                if each.is_file():
                    shutil.copy2(each, staging)
        _write_config(config, staging / "config.json")
        for each in sorted(staging.iterdir(), key=lambda each: each.name == "config.json"):
            each.replace(directory / each.name)


def _write_config(config: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
