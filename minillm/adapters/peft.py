"""Read an adapter from the files that PEFT writes: adapter_config.json and adapter_model.safetensors.

Layout: https://huggingface.co/docs/peft/developer_guides/checkpoint. A matrix's factors are named after its module, as
"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" [rank, in] and "...lora_B.weight" [out, rank]. What an
adapter adds is B A x alpha / rank, or alpha / sqrt(rank) with use_rslora (Kalajdzievski 2023, "A Rank Stabilization
Scaling Factor for Fine-Tuning with LoRA"). A field that changes anything else is refused by its name: an adapter that
were read without it would answer, but wrongly.
Only the header of the tensors is read to tell whether an adapter fits: its file may have gigabytes that do not.
"""

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.model.checkpoint import (
    FILE_DTYPES,
    FLOATING,
    Entry,
    Pieces,
    buffer_bytes,
    is_consistent,
    overlapping,
    read_header,
)
from minillm.model.config import ModelConfig
from minillm.model.modules import Module, modules
from minillm.values import as_float, as_int, read_json, shown

from .patterns import ModuleKey, read_patterns, value_for

CONFIG, FACTORS = "adapter_config.json", "adapter_model.safetensors"
LARGEST_CONFIG, LARGEST_HEADER = 1 << 20, 4 << 20  # bytes: many times what a model with 100 layers needs
# Fields that say how an adapter was trained or found, or where: its tensors have what follows from them.
HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules"),
    *("fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha"),
    *("loftq_config", "lora_dropout", "megatron_config", "megatron_core", "peft_type", "peft_version"),
    *(
        "qalora_group_size",
        "r",
        "rank_pattern",
        "alpha_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    ),
    "use_rslora",
}
# Others, and why they cannot be read: they change more than the product of two factors.
REFUSED = {
    "use_dora": "DoRA also scales the columns of the sum, which depends on the base weights: train with use_dora=false",
    "bias": 'biases that were trained belong to the base model: train with bias="none"',
    "lora_bias": "its factors have biases: train with lora_bias=false",
    "modules_to_save": "it replaces whole modules: merge them into the model, and train the adapter alone",
    "trainable_token_indices": "it replaces rows of the embedding: merge them into the model",
    "target_parameters": "it adapts parameters that are no module's weight",
    "layer_replication": "it changes the number of layers",
}
# Initial values that also change the base weights, so the adapter does not fit the model as it is.
CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq")
NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
# What may stand before the layers of the text model; a vision tower has layers of its own.
PREFIXES = ("model.", "", "model.language_model.", "language_model.model.", "language_model.")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
Factors = tuple[Tensor, Tensor]  # A [rank, in] and B [out, rank], which includes the scale


@dataclass(frozen=True)
class StoredFactors:
    """The place of the factors of one module of the model: A, and some rows of B, which `scale` multiplies."""

    down: Entry
    up: Entry
    rows: range
    scale: float

    def read(self) -> Factors:
        """Return the factors, in float32, or in float64 if their file is. Raises ConfigError if they are not all
        numbers.
        """
        down, up = read_matrix(self.down), read_matrix(self.up, self.rows) * self.scale
        if not (down.isfinite().all() and up.isfinite().all()):
            raise ConfigError(f"adapter {self.up.file.parent}: its factors are not all numbers: it is damaged")
        return down, up


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter's parts by the names of the modules that they change. Their factors are still in the file.

    directory: where it is. rank: the greatest of its factors.
    """

    directory: Path
    rank: int
    parts: Mapping[str, StoredFactors]


def read_adapter(directory: str | Path, config: ModelConfig) -> Adapter:
    """Read what an adapter of a model with this config has, and where.

    Raises ConfigError, which names what cannot be read and why.
    """
    directory = Path(directory)
    described = read_description(directory)
    try:
        _check_fields(described)
        entries = read_entries(directory)
        if shared := overlapping(entries):
            raise ConfigError(f"{FACTORS}: tensors {shared[0]} and {shared[1]} share bytes")
        patterns = [read_patterns(described.get(field), field) for field in ("rank_pattern", "alpha_pattern")]
        known = {part.name: part for address, parts in modules(config).items() if "." in address for part in parts}
        found = dict[str, StoredFactors]()
        for module, (down, up) in _pairs(entries).items():
            parts = _of_modules(module, down, up, described, patterns, known)
            if twice := found.keys() & parts.keys():
                raise ConfigError(f"it changes {min(twice)} twice, the second time as {module}")
            found |= parts
    except ConfigError as error:
        raise ConfigError(f"adapter {directory}: {error}") from None
    if not found:
        raise ConfigError(f"adapter {directory}: {FACTORS} has no factors: nothing would change")
    return Adapter(directory, max(part.down.shape[0] for part in found.values()), found)


def read_description(directory: Path) -> dict[str, Any]:
    """Return the fields of a directory's adapter_config.json. Raises ConfigError."""
    path = directory / CONFIG
    if not path.is_file():
        raise ConfigError(f"{directory} has no {CONFIG}: give the directory that PEFT's save_pretrained wrote")
    if (size := path.stat().st_size) > LARGEST_CONFIG:
        raise ConfigError(f"{path} has {size:,} bytes, and PEFT writes some thousands: at most {LARGEST_CONFIG:,}")
    return read_json(path, ConfigError)


def read_entries(directory: Path) -> dict[str, Entry]:
    """Return where each tensor is in a directory's adapter_model.safetensors, by its name. Raises ConfigError."""
    path = directory / FACTORS
    if not path.is_file():
        raise ConfigError(f"it has no {FACTORS}: save it as safetensors")
    try:
        with path.open("rb") as stream:
            first = stream.read(8)
    except OSError as error:
        raise ConfigError(f"{FACTORS} cannot be read: {error.strerror}") from None
    if len(first) == 8 and LARGEST_HEADER < (size := struct.unpack("<Q", first)[0]) < path.stat().st_size:
        raise ConfigError(f"the header of {FACTORS} has {size:,} bytes, and may have {LARGEST_HEADER:,}")
    return read_header(path)


def _check_fields(described: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field that changes more than the product of two factors."""
    if (kind := described.get("peft_type")) != "LORA":
        raise ConfigError(f'peft_type is {shown(kind)}, and only "LORA", "PROMPT_TUNING" and "P_TUNING" are supported')
    for name, why in REFUSED.items():
        if described.get(name) not in (None, False, "none", [], {}):
            raise ConfigError(f"{name}={shown(described[name])}: {why}")
    begins = described.get("init_lora_weights")
    if isinstance(begins, str) and begins.lower().startswith(CHANGES_THE_BASE):
        raise ConfigError(
            f"init_lora_weights={begins!r} also changed the base weights: convert it into plain factors when saving "
            "(path_initial_model_for_weight_conversion)"
        )
    for name, value in described.items():
        if name not in HARMLESS | REFUSED.keys() and value not in (None, False, "", [], {}):
            raise ConfigError(f"{name}={shown(value)}: this field is not known here, and may change what is computed")


def _pairs(entries: Mapping[str, Entry]) -> dict[str, tuple[Entry, Entry]]:
    """Return the entries of A and B by the name of their module. Raises ConfigError for any other tensor."""
    found: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        match = NAME.fullmatch(name)
        if match is None:
            raise ConfigError(f"tensor {name} is no factor of a linear layer (lora_A, lora_B): {_what(name)}")
        if FILE_DTYPES.get(entry.dtype) not in FLOATING or len(entry.shape) != 2 or not is_consistent(entry):
            raise ConfigError(f"tensor {name} must be a matrix of floating-point numbers, not {entry.dtype}")
        found.setdefault(match["module"], {})[match["factor"]] = entry
    for module, both in found.items():
        if len(both) < 2:
            raise ConfigError(f"{module} has lora_{next(iter(both))} alone, without the other factor")
    return {module: (both["A"], both["B"]) for module, both in found.items()}


def _what(name: str) -> str:
    if "magnitude" in name:
        return REFUSED["use_dora"]
    if "embedding" in name or "embed_tokens" in name or "lm_head" in name:
        return "adapters of embeddings and heads are not supported: train without them"
    return REFUSED["lora_bias"] if name.endswith("bias") else REFUSED["modules_to_save"]


def _of_modules(
    module: str,
    a: Entry,
    b: Entry,
    described: Mapping[str, Any],
    patterns: Sequence[Sequence[tuple[ModuleKey, Any]]],
    known: Mapping[str, Module],
) -> dict[str, StoredFactors]:
    """Return the parts of each module of the model that a module of the adapter changes. A fused one changes several.

    patterns: rank_pattern and alpha_pattern. known: the linear layers of the model.
    """
    ranks, alphas = patterns
    before, layers, rest = module.partition("layers.")
    name = f"model.{layers}{rest}" if before in PREFIXES else module
    prefix, _, last = name.rpartition(".")
    names = [f"{prefix}.{each}" for each in FUSED.get(last, (last,))]
    if not all(each in known for each in names):
        raise ConfigError(
            f"it changes {module}, and this model has no such linear layer; those of its layers are "
            f"{', '.join(dict.fromkeys(each.rpartition('.')[2] for each in known))}, or fused {', '.join(FUSED)}, "
            f"after model.layers.0 and so on; embeddings and heads are not supported"
        )
    parts: list[Module] = [known[each] for each in names]
    rank = value_for(ranks, module, described.get("r"))
    whole = as_int(rank)
    if whole is None or whole < 1 or a.shape[0] != whole or b.shape[1] != whole:
        raise ConfigError(
            f"{module} has factors {list(a.shape)} and {list(b.shape)}, and its rank is {shown(rank)} (r, rank_pattern)"
        )
    alpha = as_float(given := value_for(alphas, module, described.get("lora_alpha")))
    if alpha is None:
        raise ConfigError(f"{module}: lora_alpha must be a number, not {shown(given)}")
    inputs, rows = parts[0].inputs, sum(len(part.rows) for part in parts)
    if a.shape[1] != inputs or b.shape[0] != rows:
        raise ConfigError(
            f"{module} is a matrix of {rows} x {inputs} here, and the adapter's factors, {list(b.shape)} and "
            f"{list(a.shape)}, are of another one: it was trained on another model"
        )
    scale = alpha / (whole**0.5 if described.get("use_rslora") else whole)
    ends = list(accumulate(len(part.rows) for part in parts))
    return {
        part.name: StoredFactors(a, b, range(end - len(part.rows), end), scale)
        for part, end in zip(parts, ends, strict=True)
    }


def read_matrix(entry: Entry, rows: range | None = None) -> Tensor:
    """Return a matrix of a file, or these rows of it, in float32, or float64 if the file has that."""
    rows = range(entry.shape[0]) if rows is None else rows
    pieces = Pieces(entry, torch.empty(buffer_bytes(entry, len(rows)), dtype=torch.uint8), max(1, len(rows)))
    dtype = torch.promote_types(FILE_DTYPES[entry.dtype], torch.float32)
    return torch.cat([piece.to(dtype, copy=True) for piece in pieces.part(rows)])
