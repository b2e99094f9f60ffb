"""Checkpoints in the layouts of other tools, packed number by number as their documents say, with their dense twins."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.test_decoder import Paged

SIZE = 16
IDS = list(range(5, 35))


def logits_of(model, ids: Iterable[int] = IDS) -> Tensor:
    paged = Paged(model)
    return paged.forward({}, {paged.admit(): list(ids)}, every=True)


def numbers(codes: Tensor, order: Iterable[int] = range(8), bits: int = 4) -> Tensor:
    """[..., n] codes from 0 -> [..., n * bits / 32] int32: code order[i] of each number lies i places from its end."""
    each = 32 // bits
    grouped = codes.long().unflatten(-1, (-1, each))
    found = torch.zeros(grouped.shape[:-1], dtype=torch.long)
    for place, which in enumerate(order):
        found += grouped[..., which] << bits * place
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int()


Module = tuple[dict[str, Tensor], Tensor]  # what is stored, and the dense weight [rows, in] in float64


def random_codes(rows: int, inputs: int, generator: torch.Generator, size: int = SIZE) -> tuple[Tensor, Tensor, Tensor]:
    """codes [rows, in] and zeros [rows, groups] from 0 to 15, and scales [rows, groups] of float16 in float32."""
    codes = torch.randint(0, 16, (rows, inputs), generator=generator)
    zeros = torch.randint(1, 16, (rows, inputs // size), generator=generator)
    scales = (torch.rand(rows, inputs // size, generator=generator) * 0.05 + 0.01).half().float()
    return codes, zeros, scales


def weight_of(codes: Tensor, zeros: Tensor | int, scales: Tensor, groups: Tensor | None = None) -> Tensor:
    """Dequantize by the definition. groups: of each input; default: neighbors."""
    groups = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1]) if groups is None else groups
    zeros = zeros[:, groups] if isinstance(zeros, Tensor) else zeros
    return (codes - zeros).double() * scales.double()[:, groups]


def gptq(rows: int, inputs: int, generator: torch.Generator, *, symmetric=False, minus=1, groups=None) -> Module:
    """minus: what the file subtracts from zero points."""
    codes, zeros, scales = random_codes(rows, inputs, generator)
    if symmetric:
        zeros = torch.full_like(zeros, 8)
    stored = {
        "qweight": numbers(codes).t().contiguous(),
        "qzeros": numbers((zeros - minus).t()),
        "scales": scales.half().t().contiguous(),
        "g_idx": (torch.arange(inputs) // SIZE if groups is None else groups).int(),
    }
    return stored, weight_of(codes, zeros, scales, groups)


def gptq8(rows: int, inputs: int, generator: torch.Generator) -> Module:
    codes = torch.randint(0, 256, (rows, inputs), generator=generator)
    scales = (torch.rand(rows, 1, generator=generator) * 0.003 + 0.001).half().float()
    stored = {
        "qweight": numbers(codes, range(4), 8).t().contiguous(),
        "qzeros": numbers(torch.full((1, rows), 127), range(4), 8),
        "scales": scales.half().t().contiguous(),
    }
    return stored, weight_of(codes, 128, scales)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(rows: int, inputs: int, generator: torch.Generator, *, symmetric=False, order=AWQ_ORDER) -> Module:
    codes, zeros, scales = random_codes(rows, inputs, generator)
    if symmetric:
        zeros = torch.full_like(zeros, 8)
    stored = {
        "qweight": numbers(codes.t(), order),
        "qzeros": numbers(zeros.t(), order),
        "scales": scales.half().t().contiguous(),
    }
    return stored, weight_of(codes, zeros, scales)


def modelopt_int4(rows: int, inputs: int, generator: torch.Generator) -> Module:
    codes, _, scales = random_codes(rows, inputs, generator)
    signed = codes - 8
    nibbles = signed & 15
    return {"weight": (nibbles[0::2] + 16 * nibbles[1::2]).byte(), "weight_scale": scales}, weight_of(signed, 0, scales)


def modelopt_fp8(rows: int, inputs: int, generator: torch.Generator, *, per_row=False) -> Module:
    codes = (torch.randn(rows, inputs, generator=generator) * 60).to(torch.float8_e4m3fn)
    scales = torch.rand(rows if per_row else 1, generator=generator) * 0.003 + 0.001
    weight = codes.double() * scales.double().view(-1, 1)
    return {"weight": codes, "weight_scale": scales if per_row else scales.view(())}, weight


def modelopt_int8(rows: int, inputs: int, generator: torch.Generator) -> Module:
    codes = torch.randint(-127, 128, (rows, inputs), generator=generator).to(torch.int8)
    scales = torch.rand(rows, generator=generator) * 0.003 + 0.001
    return {"weight": codes, "weight_scale": scales}, codes.double() * scales.double()[:, None]


def rewrite(
    directory: Path,
    write: Callable[[str, int, int, torch.Generator], Module | None],
    config: dict | None,
    files: dict[str, dict] | None = None,
) -> Path:
    """Quantize a saved model's projections at random; the directory of its dense twin.

    write: (module, rows, inputs, generator) -> what to store, or None to leave it dense. config: `quantization_config`.
    files: other JSON files.
    """
    generator, file = torch.Generator().manual_seed(0), directory / "model.safetensors"
    tensors, dense = {}, {}
    for name, tensor in load_file(file).items():
        module = name.removesuffix(".weight")
        quantized = None
        if name.endswith("_proj.weight") or name == "lm_head.weight":
            quantized = write(module, *tensor.shape, generator)
        if quantized is None:
            tensors[name] = dense[name] = tensor
            continue
        tensors |= {f"{module}.{last}": value for last, value in quantized[0].items()}
        dense[name] = quantized[1]
    twin, path = directory / "dense", directory / "config.json"
    twin.mkdir()
    (twin / "config.json").write_text(path.read_text())
    save_file(dense, twin / "model.safetensors")
    save_file(tensors, file)
    if config is not None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    for name, content in (files or {}).items():
        (directory / name).write_text(json.dumps(content))
    return twin
