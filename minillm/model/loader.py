"""Load a model's parameters from safetensors files, or fill them with random numbers.  Lesson 00.

Parameters are allocated once, on the device. Every tensor of the checkpoint is streamed through a small buffer into its
slice of them. So loading needs little more memory than the model itself, for all sizes of files and all dtypes.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from minillm import pretrained
from minillm.errors import ConfigError
from minillm.folders import DATA
from minillm.quantization import Dense, Recipe, Shard, Weight, weight_only
from minillm.quantization.checkpoints import ANY, Layout, read_layout
from minillm.quantization.weight import copy_pieces, joined
from minillm.values import shown

from .checkpoint import (
    FILE_DTYPES,
    FLOATING,
    Entry,
    Pieces,
    are_equal,
    buffer_bytes,
    is_consistent,
    overlapping,
    read_headers,
    rows_at_once,
)
from .config import PRESETS, ModelConfig
from .decoder import Model
from .exact import make_exact
from .families import ARCHITECTURES
from .input_factors import fold_input_factors
from .modules import EMBEDDING, HEAD, Module, layer_inputs, modules
from .parallel import OneDevice, Parallel
from .replaceable import PARTS

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
EMBEDDED = DATA / "tiny-gemma"
GB = 1e9
# What some checkpoints store, and no result depends on: what follows from config.json, and scales for a quantized
# cache, whose names differ from tool to tool.
UNUSED = re.compile(
    r".*(rotary_emb\.inv_freq|self_attn\.([qkv]_proj\.|attn\.)?(q|k|v|kv|prob)_(scale|zero_point)"
    r"|self_attn\.[kv]_proj\.output_(scale|zero_point))"
)

log = logging.getLogger(__name__)


def load_model(
    model: str | Path | None = None,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    max_model_len: int | None = None,
    seed: int = 0,
    recipe: Recipe | None = None,
    kv_cache_dtype: str = "auto",
    parallel: Parallel = OneDevice(),
    exact: bool = False,
) -> Model:
    """Build a model and fill its parameters.  Lesson 00.

    model          a directory in Hugging Face's layout, a preset's name (only a shape: needs load_format="dummy"), or
                   None for the embedded tiny-gemma
    dtype          "auto" (float32 on a CPU, the checkpoint's own on a GPU) or a key of DTYPES
    load_format    "auto", or "dummy" for random weights from `seed`
    max_model_len  tokens of context; default and maximum: the model's own
    recipe         the format of each weight; formats other than dense are quantized while they are read. Default: as
                   the checkpoint stores them. Only an unquantized checkpoint can have another
    kv_cache_dtype format of the cache: "auto" (the model's dtype), "int8" or "fp8"
    parallel       the GPUs that share the model; only this one's shard of its stage's layers is loaded
    exact          whether a token's logits are the same bits in every step

    Raises ConfigError.
    """
    source = resolve(model)
    if isinstance(source, str) and load_format != "dummy":
        raise ConfigError(
            f'"{source}" is a shape without weights: pass load_format="dummy" for random ones, or a directory'
        )
    config = read_config(source)
    if max_model_len is not None and max_model_len > config.max_model_len:
        raise ConfigError(f"max_model_len={max_model_len} is more than this model's {config.max_model_len} tokens")
    dtype = resolve_dtype(dtype, config, device)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}")
    if dtype == "float16" and ARCHITECTURES[config.architecture].overflows:
        log.warning(
            "dtype=float16: models of %s are known to compute numbers beyond its range, and their requests then end "
            "with an error; dtype=bfloat16 and dtype=float32 have room for them",
            config.architecture,
        )
    layout = read_layout(source) if isinstance(source, Path) else None
    entries: dict[str, Entry] = {}
    if load_format != "dummy" and isinstance(source, Path):
        config, entries = with_stored_head(config, read_headers(source), source)
    if layout is not None:
        if recipe is not None:
            raise ConfigError(f"{source} is quantized already; quantize the model that it was made from")
        try:
            recipe = stored_recipe(config, layout)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
    recipe = recipe or Recipe()
    try:
        longest = max_model_len or config.max_model_len
        built = Model(
            config,
            dtype=DTYPES[dtype],
            device=device,
            max_model_len=longest,
            recipe=recipe,
            kv_cache_dtype=kv_cache_dtype,
            parallel=parallel,
        )
    except torch.OutOfMemoryError as error:
        sizes = {each: _gigabytes(config, each, recipe) for each in (dtype, "bfloat16")}
        free = torch.cuda.mem_get_info(device)[0] / GB
        with_formats = " and the recipe's formats" if recipe.rules else ""
        less = f"; in bfloat16 they are {sizes['bfloat16']:.1f} GB" if sizes["bfloat16"] < sizes[dtype] else ""
        raise ConfigError(
            f"the weights in {dtype}{with_formats} are {sizes[dtype]:.1f} GB, and {device} has {free:.1f} GB "
            f"free{less}; free memory on the GPU, or use a smaller model"
        ) from error
    if isinstance(source, str) or load_format == "dummy":
        fill_randomly(built, seed)
    else:
        fill_from_files(built, entries, source, layout)
    for name, why in simulated(built).items():
        log.warning("%s weights are simulated, to measure accuracy: %s", name, why)
    if why := without_fp8(built):
        log.warning(why)
    if exact:
        make_exact(built)
    return built


def resolve_dtype(dtype: str, config: ModelConfig, device: str) -> str:
    """Return the dtype that an engine's option names; "auto": float32 on a CPU, else the model's own. Raises
    ConfigError.

    A GPU before Ampere has no bfloat16: "auto" takes another dtype there, and the log says so.
    """
    auto, kind = dtype == "auto", torch.device(device).type
    if auto:
        dtype = "float32" if kind == "cpu" else config.dtype
    if dtype != "bfloat16" or kind != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0):
        return dtype
    other = "float32" if ARCHITECTURES[config.architecture].overflows else "float16"
    why = f"{torch.cuda.get_device_name(device)} has no bfloat16, which needs compute capability 8.0"
    if not auto:
        raise ConfigError(f"dtype=bfloat16: {why}; use dtype={other}, or dtype=auto, which takes it")
    log.warning("dtype=auto: %s, so the model runs in %s", why, other)
    return other


def without_fp8(model: Model) -> str:
    """Return a warning for a model with FP8 products on a GPU that cannot multiply FP8 numbers; "" for all others."""
    kinds = {weight.activations.kind for weight in model.weights() if weight.activations is not None}
    if "fp8" not in kinds or model.device.type != "cuda" or torch.cuda.get_device_capability(model.device) >= (8, 9):
        return ""
    name = torch.cuda.get_device_name(model.device)
    return (
        f"FP8 products are simulated: {name} multiplies no FP8 numbers, which needs compute capability 8.9, so inputs "
        "are rounded to FP8 and multiplied in the model's dtype; results are the same, but no faster than without FP8"
    )


def simulated(model: Model) -> dict[str, str]:
    """Return the formats of a model's weights that are only for measuring accuracy, and why: {"nvfp4": ...}."""
    formats = {weight.format.name: weight.format for weight in model.weights()}
    return {name: why for name, each in formats.items() if (why := getattr(each, "simulated", ""))}


def _gigabytes(config: ModelConfig, dtype: str, recipe: Recipe) -> float:
    """Return what a model's weights take, in GB."""
    return Model(config, dtype=DTYPES[dtype], device="meta", max_model_len=1, recipe=recipe).nbytes / GB


def rounded(source: Path | str, layers: str | None, head: str | None) -> Recipe | None:
    """Return the recipe of a model that is rounded while it is read: formats of its layers and its head, by their
    names.
    """
    return Recipe.uncalibrated(layers, head, layer_inputs(read_config(source)))


def stored_recipe(config: ModelConfig, layout: Layout) -> Recipe:
    """Return the format of each weight as a checkpoint stores it. If its modules have different formats, it is dense.

    Raises ConfigError if their inputs, which they share, are quantized in different ways.
    """
    rules = {}
    for address, parts in modules(config).items():
        formats = {layout.format(module.name, module.inputs) for module in parts}
        activations = {each.activations for each in formats}
        if len(activations) > 1:
            names = ", ".join(module.name for module in parts)
            raise ConfigError(
                f"{names} share their input, but quantize it in different ways, which is not supported: quantize the "
                "model again, all of them in one way"
            )
        rules[address] = formats.pop() if len(formats) == 1 else Dense(activations.pop())
    if config.tie_word_embeddings:  # the table is stored as the embedding; the head's inputs may be quantized
        head = layout.format(HEAD, config.hidden_size)
        if weight_only(head) == rules["head"]:
            rules["head"] = head
    return Recipe(rules)


def read_config(source: Path | str) -> ModelConfig:
    """Return the config of a model, given what `resolve` returned."""
    return PRESETS[source] if isinstance(source, str) else ModelConfig.from_directory(source)


def resolve_device(device: str) -> str:
    """Return the device that an engine's option names; "auto": a GPU if torch finds one. Raises ConfigError."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("device='cuda', but torch finds no GPU here; use device='cpu', or see `minillm doctor`")
    return device


def resolve(model: str | Path | None) -> Path | str:
    """Return the directory that `model` names, or a preset's name; None: the embedded model. Raises ConfigError.

    model: a directory, a preset's name, or a name that `minillm.pretrained` finds a directory for.
    """
    if model is None:
        if not EMBEDDED.is_dir():
            raise ConfigError(
                f"the embedded model is not at {EMBEDDED}: reinstall minillm, or name a model's directory"
            )
        return EMBEDDED
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path
    except RuntimeError:  # ~name, and no such user
        raise ConfigError(f"no such model directory: {shown(str(model))}") from None
    except OSError as error:
        raise ConfigError(f"{shown(str(model))} cannot be read as a model's directory: {error.strerror}") from None
    if str(model) in PRESETS:
        return str(model)
    return pretrained.directory(model, PRESETS)


@dataclass(frozen=True)
class Destination:
    """Takes a tensor of the checkpoint."""

    shape: tuple[int, ...] | None  # ANY: a length that only the file says; None: any
    load: Callable[[Iterable[Tensor]], None]  # takes the tensor in pieces of its first axis, in order
    dtypes: tuple[torch.dtype, ...] = FLOATING  # that the tensor may have
    required: bool = True
    module: "QuantizedModule | None" = None  # which needs all its tensors before it fills its weight


def destinations(model: Model, layout: Layout | None = None) -> dict[str, Destination]:
    """The name of each tensor that the model needs -> where it goes. layout: of a quantized checkpoint."""
    targets: dict[str, Destination] = {}
    weights, local, parallel = model.addressed(), modules(model.local), model.parallel
    for address, parts in modules(model.config).items():
        for module, held in zip(parts, local[address], strict=True) if address in weights else ():
            part = Shard(*PARTS.shard(module, parallel.rank, parallel.size))
            found, wanted = tuple(map(len, part)), (len(held.rows), held.inputs)
            if found != wanted:
                raise ConfigError(
                    f"shard gave {found[0]} rows and {found[1]} columns of {module.name} for rank {parallel.rank} of "
                    f"{parallel.size}: it must give {wanted[0]} and {wanted[1]}"
                )
            targets |= _of_module(module, weights[address], held.rows, part, layout)
    for name, norm in named_norms(model).items():
        targets[name] = Destination(tuple(norm.shape), partial(copy_pieces, norm))
    return targets


def elsewhere(model: Model) -> tuple[str, ...]:
    """Return the beginnings of names of tensors that only other stages of a pipeline need."""
    found = [f"model.layers.{index}." for index in range(model.config.num_layers) if index not in model.held]
    weights = model.addressed()
    for address, parts in modules(model.config).items():
        if "." not in address and address not in weights:
            found += [f"{module.name}." for module in parts]
    return tuple(found)


def named_norms(model: Model) -> dict[str, Tensor]:
    """Return the weights of all norms by their names in the checkpoint. The model's contain the family's offset."""
    by_name = {"model.norm.weight": model.final_norm}
    for index, layer in zip(model.held, model.layers, strict=False):
        for norm, name in ARCHITECTURES[model.config.architecture].norms.items():
            by_name[f"model.layers.{index}.{name}.weight"] = getattr(layer, norm)
    return by_name


def _of_module(
    module: Module, weight: Weight, rows: range, part: Shard, layout: Layout | None
) -> dict[str, Destination]:
    """rows: of the weight; they hold this part of the module."""
    shapes: dict[str, tuple[int, ...]] = {"weight": (len(module.rows), module.inputs)}
    if weight.bias is not None:
        shapes["bias"] = (len(module.rows),)
    targets = {
        f"{module.name}.{name}": Destination(shape, partial(weight.load, name, rows, shard=part))
        for name, shape in shapes.items()
    }
    if layout is None or layout.format(module.name, module.inputs) == Dense():
        return targets
    del targets[f"{module.name}.weight"]
    parts = QuantizedModule(module, weight, rows, part, layout)
    stored = {
        f"{module.name}.{name}": Destination(each.shape, partial(parts.add, name), each.dtypes, each.required, parts)
        for name, each in parts.tensors.items()
    }
    return stored | targets  # a bias that the model has goes to its weight; a layout may know of others


class QuantizedModule:
    """Collects the tensors of one module of a quantized checkpoint; when all are there, it fills the weight."""

    def __init__(self, module: Module, weight: Weight, rows: range, part: Shard, layout: Layout):
        self.module, self.weight, self.rows, self.part, self.layout = module, weight, rows, part, layout
        self.tensors = layout.tensors(module.name, len(module.rows), module.inputs)
        self.collected: dict[str, Tensor] = {}
        self.input_factors: Tensor | None = None

    def add(self, name: str, pieces: Iterable[Tensor]) -> None:
        """One of the tensors, in pieces of its first axis."""
        self.collected[name] = joined(pieces)

    def finish(self) -> None:
        """Convert what was collected and fill the weight's rows."""
        codes = self.layout.codes(self.module.name, self.module.inputs, self.collected)
        self.weight.fill(self.rows, codes.cut(self.part))
        scale = self.layout.input_scale(self.module.name, self.collected)
        if scale is not None and not 0 < scale.item() < math.inf:
            raise ConfigError(f"{self.module.name}: the scale of its inputs must be positive, not {scale.item()}")
        if scale is not None and self.weight.input_scale is not None:  # the weight's modules share their input
            torch.maximum(self.weight.input_scale, scale.to(self.weight.input_scale), out=self.weight.input_scale)
        factors = self.layout.input_factors(self.collected)
        if factors is not None:
            self.input_factors = factors[self.part.columns.start : self.part.columns.stop]
        self.collected = {}


def with_stored_head(
    config: ModelConfig, entries: dict[str, Entry], directory: Path
) -> tuple[ModelConfig, dict[str, Entry]]:
    """Decide from a model's files whether its head is the embedding: (config, entries without a head that is a copy).

    Tools that train or quantize a model may leave tie_word_embeddings true in config.json and store another head. The
    head is used then, as in transformers. A file may also store the tied matrix as the head alone, or twice.
    """
    own = {name for name in entries if name.startswith(f"{HEAD}.")}
    if not config.tie_word_embeddings or not own:
        return config, entries
    head, table = f"{HEAD}.weight", f"{EMBEDDING}.weight"
    if own == {head}:
        rest = {name: entry for name, entry in entries.items() if name != head}
        if not any(name.startswith(f"{EMBEDDING}.") for name in entries):
            return config, {table: entries[head]} | rest
        if table in entries and are_equal(entries[head], entries[table]):
            return config, rest
    log.warning(
        "%s: config.json ties the head to the embedding, but the file %s has another head, which is used: set "
        "tie_word_embeddings to false there",
        directory,
        entries[min(own)].file.name,
    )
    return replace(config, tie_word_embeddings=False), entries


def fill_from_files(model: Model, entries: dict[str, Entry], directory: Path, layout: Layout | None = None) -> None:
    """Stream every tensor into the model. Names, shapes and dtypes are checked before any data is read."""
    targets, others = destinations(model, layout), elsewhere(model)
    entries = {
        name: entry for name, entry in entries.items() if not (UNUSED.fullmatch(name) or name.startswith(others))
    }
    _check_names(targets, entries, directory)
    for name, entry in entries.items():
        wanted = targets[name].shape
        if entry.shape == () and wanted in ((1,), None):  # some tools write single numbers this way
            entry = entries[name] = replace(entry, shape=(1,))
        if wanted is not None and not _fits(entry.shape, wanted):
            raise ConfigError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}, but config.json makes it {list(wanted)}"
            )
        supported = [each for each, dtype in FILE_DTYPES.items() if dtype in targets[name].dtypes]
        if entry.dtype not in supported:
            raise ConfigError(f"{entry.file}: tensor {name} is {entry.dtype}; supported are {', '.join(supported)}")
        if not is_consistent(entry):
            raise ConfigError(f"{entry.file}: tensor {name} has {entry.nbytes} bytes, which do not match its shape")
    if shared := overlapping(entries):
        name, other = shared
        raise ConfigError(f"{entries[name].file} is damaged: tensors {name} and {other} share bytes. Copy it again")
    # One buffer for all tensors: with one for each, fragmentation would raise the peak to several of them.
    largest = max(buffer_bytes(entry, rows_at_once(entry)) for entry in entries.values())
    buffer = torch.empty(largest, dtype=torch.uint8)
    left = Counter(id(targets[name].module) for name in entries)
    factors: dict[str, Tensor] = {}
    for name, entry in entries.items():
        targets[name].load(Pieces(entry, buffer, rows_at_once(entry)))
        left[id(module := targets[name].module)] -= 1
        if module is None or left[id(module)]:
            continue
        try:
            module.finish()
        except ConfigError as error:
            raise ConfigError(f"{entry.file}: {error}") from None
        if module.input_factors is not None:
            factors[module.module.name] = module.input_factors
    for norm in model.norms():
        norm.add_(model.config.norm_offset)
    try:
        fold_input_factors(model, factors)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from None


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(most in (ANY, own) for own, most in zip(shape, wanted, strict=True))


def _check_names(targets: dict[str, Destination], entries: dict[str, Entry], directory: Path) -> None:
    problems = []
    if missing := sorted({name for name, target in targets.items() if target.required} - entries.keys()):
        problems.append(f"{len(missing)} missing: {_listed(missing)}")
        if missing == [f"{HEAD}.weight"]:
            problems.append("if the head is the embedding, set tie_word_embeddings there to true")
    if left_over := sorted(entries.keys() - targets.keys()):
        problems.append(f"{len(left_over)} that do not belong to its config.json: {_listed(left_over)}")
    if problems:
        raise ConfigError(f"the tensors in {directory} do not fit its config.json: {'; '.join(problems)}")


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def fill_randomly(model: Model, seed: int) -> None:
    """Fill a model with random weights that keep activations near 1, on its device; the same for the same seed."""
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for norm in model.norms():
        norm.fill_(1.0)
    for weight in model.weights():
        weight.randomize(generator)


class _HasVocabulary(Protocol):
    vocab_size: int


def check_tokenizer(tokenizer: _HasVocabulary, config: ModelConfig) -> None:
    """Raise ConfigError if a tokenizer has ids beyond the model's vocabulary; fewer are fine (models pad theirs).

    Tokens that only settings next to its file add, often for padding, may be beyond it: no prompt can have them.
    """
    if tokenizer.vocab_size - getattr(tokenizer, "added_by_settings", 0) > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model only {config.vocab_size}:"
            " they do not belong together; name the directory of the tokenizer that came with this model"
        )
