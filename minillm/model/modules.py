"""The modules of a checkpoint that each of a model's weights combines, and how GPUs divide them.  Lesson 02."""

from dataclasses import dataclass

from minillm.quantization import Shard

from .config import ModelConfig

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"  # the module that a head is; if it is tied, its matrix is the embedding's


@dataclass(frozen=True)
class Module:
    """A matrix of a checkpoint, such as "model.layers.0.self_attn.q_proj"."""

    name: str
    rows: range  # its output rows in the weight that it is a part of
    inputs: int
    parts: int  # equal parts that cannot be divided further: heads, rows or columns
    by_inputs: bool = False  # whether GPUs divide its inputs instead of its rows


def shard(module: Module, rank: int, size: int) -> Shard:
    """Return the rows and columns of a module that one of `size` GPUs holds. If it has fewer parts, several hold the
    same.
    """
    rows, columns = range(len(module.rows)), range(module.inputs)
    first, count = rank * module.parts // size, max(1, module.parts // size)
    length = len(columns if module.by_inputs else rows) // module.parts
    held = range(first * length, (first + count) * length)
    return Shard(rows, held) if module.by_inputs else Shard(held, columns)


def modules(config: ModelConfig) -> dict[str, list[Module]]:
    """The address of each weight of a model (see `quantization.Recipe`) -> its modules, in the order of their rows."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tied = config.tie_word_embeddings
    heads, kv_heads, vocab = config.num_heads, config.num_kv_heads, config.vocab_size
    by_address = {"head" if tied else "embedding": _joined("model", hidden, embed_tokens=(vocab, vocab))}
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        attention, mlp = f"model.{layer}.self_attn", f"model.{layer}.mlp"
        by_address[f"{layer}.qkv"] = _joined(
            attention, hidden, q_proj=(query, heads), k_proj=(kv, kv_heads), v_proj=(kv, kv_heads)
        )
        by_address[f"{layer}.attention_out"] = [
            Module(f"{attention}.o_proj", range(hidden), query, heads, by_inputs=True)
        ]
        by_address[f"{layer}.gate_up"] = _joined(mlp, hidden, gate_proj=(inner, inner), up_proj=(inner, inner))
        by_address[f"{layer}.down"] = [Module(f"{mlp}.down_proj", range(hidden), inner, inner, by_inputs=True)]
    if not tied:
        by_address["head"] = [Module(HEAD, range(vocab), hidden, vocab)]
    return by_address


def layer_inputs(config: ModelConfig) -> set[int]:
    """Return how many inputs the matrices of a model's layers have."""
    return {part.inputs for address, parts in modules(config).items() if "." in address for part in parts}


def _joined(prefix: str, inputs: int, **sizes: tuple[int, int]) -> list[Module]:
    """Modules whose rows follow each other in one weight, from the numbers of their rows and parts."""
    modules, start = [], 0
    for name, (count, parts) in sizes.items():
        modules.append(Module(f"{prefix}.{name}", range(start, start + count), inputs, parts))
        start += count
    return modules
