"""Engines with adapters, adapters' files, planted keys of the cache, and what adapters read.  Lesson 15."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from minillm.adapters.peft import read_adapter
from minillm.bench import records
from minillm.engine.llm import LLM
from minillm.folders import DATA
from minillm.model.config import ModelConfig
from minillm.model.modules import modules
from minillm.ops.signatures import LowRank
from minillm.request import RequestOptions, SamplingParams

ADAPTERS, SOFT_PROMPTS = DATA / "adapters", DATA / "soft_prompts"
RECORD = "cpu/adapter-ranks"
GREEDY = SamplingParams(max_tokens=40, temperature=0)
Factors = tuple[Tensor, Tensor]  # down [rank, in], up [out, rank]


def engine(adapters: Mapping[str, Path] | None = None) -> LLM:
    """The embedded model in float64, with room for eight adapters of rank 16 at once, and blocks of four tokens."""
    return LLM(
        device="cpu",
        dtype="float64",
        num_blocks=1024,
        block_size=4,
        adapters=adapters or {},
        max_loras=8,
        max_lora_rank=16,
    )


def tokens(count: int) -> SamplingParams:
    """Parameters for so many tokens, each the likeliest."""
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def save(factors: Mapping[str, Factors], directory: Path) -> Path:
    """Write an adapter in PEFT's files; returns the directory. Its alpha is its rank, so nothing is scaled.

    factors: by the names of the model's modules, such as "model.layers.3.mlp.up_proj".
    """
    directory.mkdir(parents=True, exist_ok=True)
    ranks = {len(down) for down, _ in factors.values()}
    assert len(ranks) == 1, f"all factors of an adapter have the same rank here, not {sorted(ranks)}"
    tensors = {}
    for module, both in factors.items():
        for name, each in zip("AB", both, strict=True):
            tensors[f"base_model.model.{module}.lora_{name}.weight"] = each.detach().float().contiguous()
    rank = ranks.pop()
    described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def load(llm: LLM, name: str, directory: Path) -> None:
    """Load an adapter in place of one that has its name, if there is one: a cell that loads one can run again."""
    if name in llm.engine.adapters.names:
        llm.engine.unload_adapter(name)
    llm.engine.load_adapter(name, directory)


@contextmanager
def added(layers: Mapping[str, torch.nn.Linear], products: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the block, the weights of these layers have products [out, in] added. Both are by module."""
    before = {name: each.weight.detach().clone() for name, each in layers.items()}
    try:
        for name, each in layers.items():
            each.weight.data += products[name]
        yield
    finally:
        for name, each in layers.items():
            each.weight.data.copy_(before[name])


def answer(llm: LLM, question: str, adapter: str | None = None, salt: str = "") -> tuple[str, int]:
    """The greedy answer, and how many tokens of the question were in the cache."""
    options = RequestOptions(cache_salt=salt)
    (done,) = llm.chat([{"role": "user", "content": question}], GREEDY, options, adapter=adapter)
    return done.text.strip(), done.num_cached_tokens


# ---- one product, three ways


@torch.inference_mode()
def merge(llm: LLM, directory: Path) -> None:
    """Add an adapter's products to the matrices of an engine, for good."""
    adapter, config = read_adapter(directory, llm.model_config), llm.model_config
    weights = llm.engine.model.addressed()
    for address, parts in modules(config).items():
        for part in parts:
            if part.name in adapter.parts:
                down, up = adapter.parts[part.name].read()
                matrix = weights[address].dequantize()[part.rows.start : part.rows.stop]
                matrix += up.to(matrix.dtype) @ down.to(matrix.dtype)


def product(directory: Path, module: str, llm: LLM) -> Tensor:
    """Return what an adapter adds to the matrix of one module, in float32."""
    down, up = read_adapter(directory, llm.model_config).parts[module].read()
    return up @ down


def matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """(out, in) of each matrix in a model's layers that an adapter may change."""
    found = modules(config)
    return [(len(part.rows), part.inputs) for address, parts in found.items() if "." in address for part in parts]


def by_parts(add: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, Tensor, LowRank], Tensor]:
    """The lesson's add_low_rank(out, x, slots, down, up), for one matrix, as the engine calls it.

    The engine keeps the matrices of queries, keys and values in one weight, and those of gate and up: here each of
    these parts is added by a call of its own.
    """

    def add_to_each_part(out: Tensor, x: Tensor, slots: Tensor, factors: LowRank) -> Tensor:
        begin, downs = 0, factors.down.chunk(len(factors.ends), dim=1)
        for down, end in zip(downs, factors.ends, strict=True):
            out[:, begin:end] = add(out[:, begin:end].clone(), x, slots, down, factors.up[:, begin:end])
            begin = end
        return out

    return add_to_each_part


# ---- the cache's key

Key = Callable[[str, str | None, int], tuple]


@contextmanager
def cache_key(key: Key) -> Iterator[None]:
    """Within the block, engines tell cached prefixes apart by key(salt, adapter's name, number of its load)."""
    own = RequestOptions.cache_key

    def planted(options: RequestOptions, load: int = 0) -> tuple:
        return key(options.cache_salt, options.adapter, load)

    RequestOptions.cache_key = planted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        RequestOptions.cache_key = own  # type: ignore[method-assign]


# ---- the record


def recorded(kind: str) -> dict[int, list[dict[str, Any]]]:
    """{rank: a row for each seed}, of whole changes that were "cut" to a rank, or of adapters "trained" at it."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in records.read(RECORD)["results"]:
        if row["kind"] == kind:
            found.setdefault(row["rank"], []).append(row)
    return found


# ---- what the lesson uses in place of exercises that are not solved


def low_rank(change: Tensor, rank: int) -> Factors:
    """The factors (down [rank, in], up [out, rank]) of the nearest matrix of this rank (Eckart and Young 1936)."""
    u, s, v = torch.linalg.svd(change, full_matrices=False)
    return s[:rank, None] * v[:rank], u[:, :rank]


def numbers_read(out: int, inputs: int, rank: int, tokens: Mapping[str | None, int]) -> tuple[int, int, int]:
    """Return how many numbers of matrices and factors a product reads: merged, by token, grouped."""
    present = {name: count for name, count in tokens.items() if count}
    adapted = {name: count for name, count in present.items() if name is not None}
    matrix, factors = out * inputs if present else 0, rank * (out + inputs)
    return len(present) * matrix, matrix + sum(adapted.values()) * factors, matrix + len(adapted) * factors


def add_low_rank(out: Tensor, x: Tensor, slots: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Add up[slot] down[slot] x[t] to each row of out [tokens, out] whose token has a slot other than 0."""
    for slot in filter(None, slots.unique().tolist()):
        tokens = (slots == slot).nonzero()[:, 0]
        out[tokens] += x[tokens] @ down[slot].T @ up[slot].T
    return out


class LoadNumbers:
    """The numbers of loads by name, as `minillm.engine.adapters` has them."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.loads = 0

    def load(self, name: str) -> None:
        """Note that an adapter was loaded."""
        self.loads += 1
        self.numbers[name] = self.loads

    def unload(self, name: str) -> None:
        """Note that an adapter was unloaded."""
        del self.numbers[name]

    def cache_key(self, salt: str, name: str | None) -> tuple:
        """Return what requests must have in common, besides tokens, to share keys and values. Raises KeyError."""
        return salt, 0 if name is None else self.numbers[name]


def kept(changes: Sequence[Tensor], products: Sequence[Tensor]) -> float:
    """The share of the changes' summed squares that products of low rank keep, from 0 to 1."""
    lost = sum(float((one - other).square().sum()) for one, other in zip(changes, products, strict=True))
    return 1 - lost / sum(float(each.square().sum()) for each in changes)
