"""What minillm is compared with: transformers' `generate`, set up as a careful user would.  Lesson 99."""

import time
from collections.abc import Sequence

import torch

from minillm.errors import ConfigError
from minillm.model.config import ModelConfig
from minillm.model.loader import DTYPES, resolve

from .workloads import BenchRequest

BATCHES = (8, 16, 32, 64)


class TransformersGenerate:
    """`model.generate` in static batches: its default cache and attention, no gradients, EOS never stops it.

    A batch is taken in order of arrival, padded on the left to its longest prompt, and generates up to its
    longest output; only the tokens each request asked for count. dtype, device and threads are the engine's.
    """

    name = "transformers"

    def __init__(self, model=None, *, dtype: str = "float32", device: str = "cpu", load_format: str = "auto"):
        from transformers import AutoModelForCausalLM, GenerationConfig

        place = resolve(model)
        kind = DTYPES[dtype]
        if load_format == "dummy":
            self.model = _random_model(place, kind, device)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(place, dtype=kind).to(device)
        self.model.eval()
        # Without an end token nothing stops early, and no processor spends time on forbidding it.
        self.model.generation_config = GenerationConfig(pad_token_id=0)
        self.device = device

    def run(self, requests: Sequence[BenchRequest], batch: int, temperature: float) -> float:
        """Seconds for all requests in static batches of `batch`."""
        start = time.perf_counter()
        for first in range(0, len(requests), batch):
            self.generate(requests[first : first + batch], temperature)
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    @torch.inference_mode()
    def generate(self, requests: Sequence[BenchRequest], temperature: float = 0.0) -> list[list[int]]:
        """One static batch; each request's own share of the output tokens."""
        width = max(len(request.prompt) for request in requests)
        longest = max(request.output_tokens for request in requests)
        padding = [width - len(request.prompt) for request in requests]
        rows = zip(requests, padding, strict=True)
        ids = torch.tensor([[0] * pad + request.prompt for request, pad in rows], device=self.device)
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding], device=self.device)
        choice = (
            {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
        )
        out = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest, **choice)
        tokens = out[:, width:].tolist()
        if len(tokens[0]) != longest:
            raise RuntimeError(f"transformers generated {len(tokens[0])} tokens where {longest} were asked for")
        return [row[: request.output_tokens] for row, request in zip(tokens, requests, strict=True)]


def batch_sizes(requests: int) -> tuple[int, ...]:
    """The static batches worth trying: 1 for a lone request, else 8 to 64 as far as there are requests."""
    if requests == 1:
        return (1,)
    return tuple(batch for i, batch in enumerate(BATCHES) if i == 0 or BATCHES[i - 1] < requests)


def _random_model(place, dtype: torch.dtype, device: str):
    """transformers' model of the same shape with random weights; speed does not depend on their values."""
    from transformers import AutoConfig, AutoModelForCausalLM, GemmaConfig

    if isinstance(place, str):
        from minillm.model.config import PRESETS

        config = _gemma_config(GemmaConfig, PRESETS[place])
    else:
        config = AutoConfig.from_pretrained(place)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _gemma_config(kind, config: ModelConfig):
    if config.architecture != "GemmaForCausalLM":
        raise ConfigError(f"the shape of a {config.architecture} has no counterpart here: name a directory instead")
    return kind(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_model_len,
    )
