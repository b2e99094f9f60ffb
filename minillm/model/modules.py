"""The modules of a checkpoint that each of a model's weights combines.  Lesson 02."""

from dataclasses import dataclass

from .config import ModelConfig

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"  # the module that a head is; if it is tied, its matrix is the embedding's


@dataclass(frozen=True)
class Module:
    """A matrix of a checkpoint, such as "model.layers.0.self_attn.q_proj"."""

    name: str
    rows: range  # its output rows in the weight that it is a part of
    inputs: int


def modules(config: ModelConfig) -> dict[str, list[Module]]:
    """The address of each weight of a model (see `quantization.Recipe`) -> its modules, in the order of their rows."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tied = config.tie_word_embeddings
    found = {"head" if tied else "embedding": _parts("model", hidden, embed_tokens=config.vocab_size)}
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        attention, mlp = f"model.{layer}.self_attn", f"model.{layer}.mlp"
        found[f"{layer}.qkv"] = _parts(attention, hidden, q_proj=query, k_proj=kv, v_proj=kv)
        found[f"{layer}.attention_out"] = _parts(attention, query, o_proj=hidden)
        found[f"{layer}.gate_up"] = _parts(mlp, hidden, gate_proj=inner, up_proj=inner)
        found[f"{layer}.down"] = _parts(mlp, inner, down_proj=hidden)
    if not tied:
        found["head"] = [Module(HEAD, range(config.vocab_size), hidden)]
    return found


def layer_inputs(config: ModelConfig) -> set[int]:
    """How many inputs the matrices of a model's layers have."""
    return {part.inputs for address, parts in modules(config).items() if "." in address for part in parts}


def _parts(prefix: str, inputs: int, **rows: int) -> list[Module]:
    found, start = [], 0
    for name, count in rows.items():
        found.append(Module(f"{prefix}.{name}", range(start, start + count), inputs))
        start += count
    return found
