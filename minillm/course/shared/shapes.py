"""The shapes of a few models that are often served, to compute with; no weights.  Lesson 02."""

from minillm.advice import sizing
from minillm.model.config import PRESETS, ModelConfig


def _llama(
    *, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int, longest: int
) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        max_model_len=longest,
    )


_LLAMA_31 = {"kv_heads": 8, "vocabulary": 128256, "longest": 131072}

SHAPES = {
    "Gemma 2B": PRESETS["gemma-2b"],
    "Llama 3.1 8B": _llama(layers=32, hidden=4096, inner=14336, heads=32, **_LLAMA_31),
    "Llama 2 7B": _llama(layers=32, hidden=4096, inner=11008, heads=32, kv_heads=32, vocabulary=32000, longest=4096),
    "Llama 3.1 70B": _llama(layers=80, hidden=8192, inner=28672, heads=64, **_LLAMA_31),
}


def print_shapes(tokens: int) -> None:
    """The size of each model and of its cache, for a token and for a request of `tokens` tokens, in bfloat16."""
    print(f"bfloat16       parameters   query/KV heads   bytes per token   {tokens:,} tokens")
    for name, shape in SHAPES.items():
        billions = sizing.parameters(shape) / 1e9
        heads = f"{shape.num_heads} / {shape.num_kv_heads}"
        each, request = sizing.kv_bytes_per_token(shape), sizing.kv_bytes(shape, tokens)
        print(f"{name:13} {billions:9.2f} B  {heads:>15}  {each:16,}  {request / 1e9:10.2f} GB")
