"""What a quantized cache holds, computed from the definition of its formats."""

from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

# All finite numbers of e4m3 from 0 up, in the order of their codes: a bias of 7, three mantissa bits, no infinity.
E4M3 = [(m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1]
LARGEST = {"int8": 127.0, "fp8": 448.0}


def rounded(x: Tensor, name: str) -> Tensor:
    """x [..., head_dim] as a cache in `name` gives it back: nearest codes, halves to even; scales in float32."""
    scale = x.float().abs().amax(-1, keepdim=True) / LARGEST[name]
    exact = x.float() / scale.where(scale > 0, 1.0)
    if name == "int8":
        codes = exact.round()
    else:
        values = torch.tensor(E4M3)
        above = torch.searchsorted(values, exact.abs().contiguous()).clamp(max=len(values) - 1)
        below = (above - 1).clamp(min=0)
        up, down = values[above] - exact.abs(), exact.abs() - values[below]
        codes = torch.where((up < down) | ((up == down) & (above % 2 == 0)), values[above], values[below])
        codes = codes * exact.sign()
    return (codes * scale).to(x.dtype)


@contextmanager
def rounding_transformers(name: str):
    """Inside the block, eager attention in transformers sees keys and values as a cache in `name` gives them back."""
    with pytest.MonkeyPatch.context() as patch:
        for family in ("gemma", "gemma2", "gemma3", "llama", "mistral", "qwen2", "qwen3"):
            module = import_module(f"transformers.models.{family}.modeling_{family}")

            def attention(layer, query, key, value, *args, own=module.eager_attention_forward, **kwargs):
                return own(layer, query, rounded(key, name), rounded(value, name), *args, **kwargs)

            patch.setattr(module, "eager_attention_forward", attention)
        yield SimpleNamespace(patch=patch)
