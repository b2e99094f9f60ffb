"""Quantize a model layer by layer, and save it.  Lessons 05 to 07."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from minillm.config import EngineConfig
from minillm.errors import ConfigError, MinillmError
from minillm.model import Model, load_model
from minillm.model.decoder import PROJECTIONS
from minillm.model.loader import EMBEDDED, check_tokenizer, named_norms, resolve
from minillm.model.modules import modules
from minillm.model.saver import check_free, save_model
from minillm.quantization import Codes, Dense, Format, Int4, QuantizedWeight, Weight, int8, weight_only
from minillm.quantization.activations import LARGEST
from minillm.quantization.checkpoints import read_layout
from minillm.quantization.methods import gptq, smoothquant
from minillm.quantization.methods.replaceable import PARTS
from minillm.quantization.methods.statistics import InputStatistics
from minillm.tokenizer import Tokenizer
from minillm.values import as_int, shown

from . import rotation
from .folding import allowed_scales, fold
from .forward import CalibrationRun
from .methods import Method, MethodRecipe

log = logging.getLogger(__name__)
TEXT = EMBEDDED.parent / "text" / "calibration.txt"
COARSE = 8.0  # steps of a static int8 scale: if a typical token's largest input gets fewer, a warning says so
ROWS, FEWER_ROWS = 64, 16  # of calibration; fewer for a large model on a CPU, where a row takes long
LARGE = 50_000_000  # parameters
MOST_TOKENS = 1 << 22  # of all calibration rows: 64 times more than usual, and far more than changes the result


def calibration_rows(tokenizer: Tokenizer, text: str, rows: int, length: int, seed: int) -> Tensor:
    """[rows, length] token ids: stretches of the text that begin at random places, each after what begins a text.

    That is what `tokenizer.encode` puts before one: often <bos>, and nothing for a tokenizer that only names a <bos>.

    Special tokens that are written out in the text, such as "<bos>", become their ids, so a text of conversations can
    hold what separates their turns.
    Raises ConfigError if the text is shorter than one row.
    """
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    own = length - len(tokenizer.prefix)
    if own < 1:
        raise ConfigError(f"length={length} leaves no room for text after {len(tokenizer.prefix)} special tokens")
    if len(ids) < own:
        raise ConfigError(f"the calibration text has {len(ids)} tokens, but a row of it needs {own}: give a longer one")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(ids) - own + 1, (rows,), generator=generator)
    begin = torch.tensor(tokenizer.prefix, dtype=torch.long).expand(rows, -1)
    return torch.cat([begin, ids[starts[:, None] + torch.arange(own)]], 1)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the calibration text {file} cannot be read: {error}") from None


def quantize(
    model: str | Path | None,
    methods: MethodRecipe,
    out: Path,
    *,
    text: Path | None = None,
    rows: int | None = None,
    length: int = 256,
    seed: int = 0,
    device: str = "auto",
    progress: bool = False,
) -> dict[str, Any]:
    """Quantize a model and save it in a new directory.  Lessons 05 to 07.

    model    a directory, or None for the embedded model
    methods  of each weight, and whether to rotate the model first
    out      the directory to write, in the layout of compressed-tensors; it must not exist, or be empty
    text     a file to calibrate on; default: embedded text that neither training nor the evaluation uses
    rows     stretches of that text that are read, `length` tokens each (at most the model's context); default: 64, and
             16 on a CPU for a model of 50 million parameters or more
    seed     chooses where they begin, and the rotation's signs
    device   "auto", "cpu", "cuda" or "cuda:1"

    Layers are quantized in order, and each is calibrated on the outputs of the quantized layers before it. Returns
    {"bytes", "dense_bytes", "seconds", "rows", "length", "scales" (the searched strengths, by address)}.
    Raises ConfigError before any layer is quantized, and MinillmError if calibration gives numbers that are not finite.
    """
    length, seed = _whole("length", length, 2), _whole("seed", seed, 0, 2**63 - 1)
    if rows is not None and (rows := _whole("rows", rows, 1)) * length > MOST_TOKENS:
        raise ConfigError(f"{rows} rows of {length} tokens are more than the {MOST_TOKENS} that fit: give fewer")
    device = _device(device)
    begin, source = time.perf_counter(), resolve(model)
    check_free(out)
    if isinstance(source, str) or read_layout(source) is not None:
        what = f"{source} is only a shape" if isinstance(source, str) else f"{source} is quantized already"
        raise ConfigError(f"{what}: name the directory of an unquantized model")
    if text is not None and not text.is_file():
        raise ConfigError(f"no such calibration text: {text}")
    dense = load_model(source, dtype="float32", device=device)
    target = getattr(torch, dense.config.dtype)
    methods = check_methods(dense, methods)
    if rows is None:
        rows = FEWER_ROWS if device == "cpu" and dense.num_parameters >= LARGE else ROWS
    before = sum(tensor.numel() for tensor in dense.tensors()) * target.itemsize
    ids, run, last = None, None, _last_calibrated(dense, methods)
    if last >= 0:
        words = _read(text or TEXT)
        length = min(length, dense.max_model_len)
        tokenizer = Tokenizer.from_pretrained(source)
        check_tokenizer(tokenizer, dense.config)
        ids = calibration_rows(tokenizer, words, rows, length, seed).to(device)
    if methods.rotate:
        rotation.rotate(dense, target, seed=seed, down=_has_int8_inputs(dense, methods))
    if ids is not None:
        run = CalibrationRun(dense, ids)
    strengths: dict[str, float | None] = {}
    with torch.inference_mode():
        for index in tqdm(range(len(dense.layers)), desc="layers", disable=not progress):
            strengths |= quantize_layer(dense, index, methods, run, target)
            if run is not None and index < last:
                run.advance(dense.layers[index])
        for address in ("head", "embedding"):
            if address in dense.addressed():
                replaced = _rounded(dense, address, methods.at(address), target)
                tied = dense.head is dense.embedding
                setattr(dense, address, replaced)
                if tied:
                    dense.embedding = replaced
        size = save_model(dense, source, out, target)
    return {
        "bytes": size,
        "dense_bytes": before,
        "seconds": round(time.perf_counter() - begin, 2),
        "rows": 0 if run is None else rows,
        "length": length,
        "scales": strengths,
    }


def _has_int8_inputs(model: Model, methods: MethodRecipe) -> bool:
    """Return whether a down projection's inputs are rounded to int8."""
    down = (methods.at(f"layers.{index}.down").format().activations for index in range(len(model.layers)))
    return any(activations is not None and activations.kind == "int8" for activations in down)


def _last_calibrated(model: Model, methods: MethodRecipe) -> int:
    """Return the last layer that has a weight whose method needs calibration; -1 if none has."""
    lengths = [
        index
        for index in range(len(model.layers))
        if any(methods.at(f"layers.{index}.{name}").calibrated for name in PROJECTIONS)
    ]
    return max(lengths, default=-1)


def quantize_layer(
    model: Model, index: int, methods: MethodRecipe, run: CalibrationRun | None, dtype: torch.dtype
) -> dict[str, float | None]:
    """Replace a layer's dense weights by quantized ones; the strengths of the scales that were searched, by address.

    run: calibration rows that have passed the layers before. dtype: of the saved model.
    """
    layer = model.layers[index]
    addresses = {name: f"layers.{index}.{name}" for name in PROJECTIONS}
    seen: dict[str, InputStatistics] = {}
    if wanted := {name: getattr(layer, name) for name in PROJECTIONS if methods.at(addresses[name]).calibrated}:
        assert run is not None
        seen = run.record(layer, wanted)
        for name, inputs in seen.items():
            if not inputs.second_moment.isfinite().all():
                raise MinillmError(
                    f"the inputs of {addresses[name]} are not finite on the calibration text: use another"
                )
    return quantize_calibrated(model, index, methods, seen, dtype)


def quantize_calibrated(
    model: Model, index: int, methods: MethodRecipe, seen: Mapping[str, InputStatistics], dtype: torch.dtype
) -> dict[str, float | None]:
    """As `quantize_layer`, with statistics of the inputs of each product whose method is calibrated, by its name."""
    layer, seen = model.layers[index], dict(seen)
    addresses = {name: f"layers.{index}.{name}" for name in PROJECTIONS}
    chosen = {name: methods.at(address) for name, address in addresses.items()}
    strengths: dict[str, float | None] = {}
    # Scales of these inputs also scale the outputs of qkv and gate_up, so those are searched after them.
    for name in ("attention_out", "down", "qkv", "gate_up"):
        if chosen[name].searches_scales:
            allowed = partial(allowed_scales, model, layer, name, dtype=dtype)
            weight, format = getattr(layer, name), _format(chosen[name], dtype)
            scales, strengths[addresses[name]] = _search(weight, format, seen[name], allowed)
            folded = fold(model, layer, name, scales, dtype)
            seen[name] = seen[name].scaled(folded)
    for name in PROJECTIONS:
        setattr(layer, name, _rounded(model, addresses[name], chosen[name], dtype, seen.get(name)))
    return strengths


def _format(method: Method, dtype: torch.dtype) -> Format:
    """Return how a method stores weights in a model that is saved in a dtype."""
    format = method.format()
    return replace(format, scale_dtype=dtype) if isinstance(format, Int4) else format


def _search(
    weight: Weight, format: Format, inputs: InputStatistics, allowed: Callable[[Tensor], Tensor]
) -> tuple[Tensor, float | None]:
    """Return the scales [in] of a product's inputs, and their strength."""
    if isinstance(format, Int4):
        return PARTS.awq_scales(weight.dequantize(), inputs, format, allowed=allowed)
    assert format.activations is not None
    return smoothquant.search_scales(weight.dequantize(), inputs, format.activations, int8.quantize, allowed=allowed)


def _rounded(
    model: Model, address: str, method: Method, dtype: torch.dtype, inputs: InputStatistics | None = None
) -> Weight:
    """Return a weight in its method's format. inputs: the statistics of what it multiplies, for methods that need
    them.
    """
    dense, format = model.addressed()[address], _format(method, dtype)
    matrix = dense.dequantize()
    if isinstance(format, Dense):
        matrix.copy_(matrix.to(dtype))  # as it will be saved: scales of the products after it may be folded into it
        return dense
    if address == "embedding":
        format = weight_only(format)
    out, columns = matrix.shape
    new = format.empty(out, columns, dense.bias is not None, dtype=model.dtype, device=model.device)
    assert isinstance(new, QuantizedWeight)
    rounded: Callable[[Tensor], Codes] = new.round
    if inputs is not None and isinstance(format, Int4):
        rounded = _calibrated(method, format, inputs)
    for module in modules(model.config)[address]:
        new.fill(module.rows, rounded(matrix[module.rows.start : module.rows.stop]))
    new.bias = dense.bias
    if new.input_scale is not None and inputs is not None and format.activations is not None:
        largest = inputs.largest.amax().item() / LARGEST[format.activations.kind]
        new.input_scale.fill_(largest if largest > 0 else 1.0)  # inputs that are always 0 must stay 0
        if format.activations.kind == "int8" and inputs.samples:
            _warn_of_coarse(address, inputs, largest)
    return new


def _warn_of_coarse(address: str, inputs: InputStatistics, scale: float) -> None:
    """Say so if a static scale, made for the largest token, leaves a typical one few steps."""
    typical = torch.cat(inputs.samples).abs().amax(1).median().item()
    if typical < COARSE * scale:
        log.warning(
            "%s: the largest input is %.0f times that of a typical token, whose inputs all fall on the %.1f lowest "
            "steps of the static scale. Without static (w8a8, smoothquant), each token has its own scale",
            address,
            inputs.largest.amax().item() / max(typical, 1e-30),
            typical / scale,
        )


def _calibrated(method: Method, format: Int4, inputs: InputStatistics) -> Callable[[Tensor], Codes]:
    """Return what rounds the parts of a weight, all of which have these inputs."""
    if method.name != "gptq":
        return lambda part: PARTS.awq_clipping(part, inputs, format)
    compensation = gptq.Compensation.of(inputs, act_order=method.act_order)
    return lambda part: PARTS.gptq(part, compensation, format)


def _whole(name: str, value: object, least: int, most: int = 2**31) -> int:
    number = as_int(value)
    if number is None or not least <= number <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, not {shown(value)}")
    return number


def _device(name: str) -> str:
    """Return a device that there is, by its name in torch."""
    name, there = EngineConfig(device=name).device, torch.cuda.device_count()
    if name == "auto":
        return "cuda" if there else "cpu"
    if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= there:
        raise ConfigError(
            f"device={name!r}, but torch finds {there} GPUs here; use device='cpu', or see `minillm doctor`"
        )
    return name


def check_methods(model: Model, methods: MethodRecipe) -> MethodRecipe:
    """Return what `fitted` returns. Raises ConfigError as it does, and as `check_finite` does."""
    methods = fitted(model, methods)
    check_finite(model)
    return methods


def check_finite(model: Model) -> None:
    """Raise ConfigError unless all parameters are numbers."""
    stored = {address: weight.stored() for address, weight in model.addressed().items()}
    for name, tensors in (stored | {name: [norm] for name, norm in named_norms(model).items()}).items():
        if not all(tensor.isfinite().all() for tensor in tensors):
            raise ConfigError(f"{name} has numbers that are not finite: the checkpoint is broken, copy it again")


def fitted(model: Model, methods: MethodRecipe) -> MethodRecipe:
    """Return the recipe for a model, with group sizes where it names none.

    Raises ConfigError unless every weight can have its method's format, and the model can be rotated if it is to be.
    """
    methods = methods.fitted({address: weight.shape[1] for address, weight in model.addressed().items()})
    if methods.rotate:
        rotation.check_rotates(model)
    for address, weight in model.addressed().items():
        out, inputs = weight.shape
        method = methods.at(address)
        try:
            method.format().empty(out, inputs, False, dtype=model.dtype, device=torch.device("meta"))
        except ConfigError as error:
            raise ConfigError(f"{address}: {error}") from None
        if method.calibrated and address in ("head", "embedding"):
            what = f"static {method.name}" if method.static else method.name
            raise ConfigError(
                f"{address}: {what} needs calibration, which reads only the layers; give it int8, int4 or fp8, or none "
                'by writing "layers.*" instead of "*"'
            )
    known = list(model.addressed())
    unused = [pattern for pattern in methods.rules if not any(fnmatchcase(address, pattern) for address in known)]
    if unused:
        raise ConfigError(f"the recipe's {', '.join(unused)} match no weight; the addresses are: {', '.join(known)}")
    if all(isinstance(methods.at(address).format(), Dense) for address in model.addressed()):
        raise ConfigError('the recipe quantizes nothing: name at least one weight, such as "layers.*", and its method')
    return methods
