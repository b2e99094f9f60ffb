"""Adapters in PEFT's files with random factors, and the model that each makes when it is merged."""

import json
import random
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from minillm.adapters.peft import FUSED

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BLOCK = {name: "mlp" if name in ("gate_proj", "up_proj", "down_proj", "gate_up_proj") else "self_attn" for name in
         (*PROJECTIONS, *FUSED)}  # fmt: skip


def write(directory: Path, model: Path, seed: int = 0, *, targets=PROJECTIONS, rank=4, strength=1.0, **fields) -> Path:
    """Write an adapter of the model in a directory, with factors so large that it changes most tokens.

    targets: its modules, fused ones too. rank: of all whose name matches nothing in `rank_pattern`, which may be one
    of `fields`, the further entries of its adapter_config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    described = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none",
        "task_type": "CAUSAL_LM", "use_dora": False, "use_rslora": False,
    } | fields  # fmt: skip
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for module, parts in modules(model, targets).items():
        shape = sum(each.shape[0] for each in parts), parts[0].shape[1]
        own = matching(described.get("rank_pattern"), module, rank)
        scale = matching(described.get("alpha_pattern"), module, described["lora_alpha"])
        scale /= own**0.5 if described["use_rslora"] else own
        for factor, size in (("A", (own, shape[1])), ("B", (shape[0], own))):
            values = torch.randn(size, generator=generator, dtype=torch.float64)
            values *= shape[1] ** -0.5 if factor == "A" else 1.5 * strength / (scale * own**0.5)
            tensors[f"base_model.model.{module}.lora_{factor}.weight"] = values.float()
    (directory / "adapter_config.json").write_text(json.dumps(described))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merge(adapter: Path, model: Path, directory: Path) -> Path:
    """Write the model that adds the adapter's products to its own matrices, in float64."""
    shutil.copytree(model, directory)
    described = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    weights = {name: weight.double() for name, weight in load_file(model / "model.safetensors").items()}
    for module in sorted({re.sub(r"base_model\.model\.|\.lora_.*", "", name) for name in factors}):
        a, b = (factors[f"base_model.model.{module}.lora_{each}.weight"].double() for each in "AB")
        alpha = matching(described.get("alpha_pattern"), module, described["lora_alpha"])
        product = b @ a * (alpha / (len(a) ** 0.5 if described["use_rslora"] else len(a)))
        prefix, _, last = module.rpartition(".")
        for name in FUSED.get(last, (last,)):
            weight = weights[f"{prefix}.{name}.weight"]
            weight += product[: len(weight)]
            product = product[len(weight) :]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def modules(model: Path, targets=PROJECTIONS) -> dict[str, list[torch.Tensor]]:
    """The matrices of each module, by the names that PEFT would give them."""
    weights, found = load_file(model / "model.safetensors"), {}
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    for layer in range(layers):
        for target in targets:
            prefix = f"model.layers.{layer}.{BLOCK[target]}"
            names = FUSED.get(target, (target,))
            found[f"{prefix}.{target}"] = [weights[f"{prefix}.{name}.weight"] for name in names]
    return found


def matching(patterns, module, otherwise):
    return next((value for pattern, value in (patterns or {}).items() if re.search(rf"(^|\.)({pattern})$", module)),
                otherwise)  # fmt: skip


def several(place: Path, model: Path, count: int, seed: int = 0) -> dict[str, Path]:
    """Adapters of different ranks, scales and targets, by their names."""
    rng = random.Random(seed)
    kinds = (
        {}, {"targets": ("q_proj", "v_proj"), "rank": 8}, {"use_rslora": True, "rank": 3},
        {"targets": ("qkv_proj", "o_proj", "gate_up_proj")}, {"rank_pattern": {"down_proj": 6, r"layers\.0\..*": 2}},
        {"alpha_pattern": {"self_attn.o_proj": 3}, "targets": ("o_proj", "down_proj")}, {"rank": 1},
        {"targets": ("up_proj", "k_proj"), "rank": 5},
    )  # fmt: skip
    return {
        f"adapter {i}": write(place / f"adapter-{i}", model, rng.randrange(2**31), **kinds[i % len(kinds)])
        for i in range(count)
    }
