"""The engines that minillm is compared with, configured as a careful user would.  Lesson 99."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from minillm.errors import ConfigError, MissingPackage
from minillm.model.config import ModelConfig
from minillm.model.loader import DTYPES, resolve

from .workloads import BenchRequest

if TYPE_CHECKING:
    from transformers import GemmaConfig, PreTrainedModel

BATCHES = (8, 16, 32, 64)


class Peer(ABC):
    """An engine that runs static batches: requests in order of arrival, each batch until its longest output.

    Only the tokens that each request wants count. dtype, device and threads are minillm's.
    """

    name: str

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        load_format: str = "auto",
    ) -> None:
        self.device = device
        self._load(resolve(model), dtype, load_format)

    @abstractmethod
    def _load(self, source: Path | str, dtype: str, load_format: str) -> None:
        """Load the model. source: what `minillm.model.loader.resolve` returned. Raises ConfigError, MissingPackage."""

    def run(self, requests: Sequence[BenchRequest], batch: int, temperature: float) -> float:
        """Return seconds for all requests in static batches of `batch`."""
        start = time.perf_counter()
        for first in range(0, len(requests), batch):
            self.generate(requests[first : first + batch], temperature)
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    @abstractmethod
    def generate(self, requests: Sequence[BenchRequest], temperature: float = 0.0) -> list[list[int]]:
        """Run one static batch and return each request's output tokens, cut to its length."""

    def _cut(self, rows: list[list[int]], requests: Sequence[BenchRequest]) -> list[list[int]]:
        longest = max(request.output_tokens for request in requests)
        if any(len(row) != longest for row in rows):
            raise RuntimeError(f"{self.name} generated {len(rows[0])} tokens where the requests have {longest}")
        return [row[: request.output_tokens] for row, request in zip(rows, requests, strict=True)]


class TransformersGenerate(Peer):
    """transformers' `model.generate`: its default cache and attention, no gradients, not stopped by EOS.

    A batch is padded on the left to its longest prompt.
    """

    name = "transformers"
    model: "PreTrainedModel"

    def _load(self, source: Path | str, dtype: str, load_format: str) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        kind = DTYPES[dtype]
        if load_format == "dummy":
            self.model = _random_model(source, kind, self.device)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(source, dtype=kind)
            self.model = loaded.to(self.device)
        self.model.eval()
        # Without an EOS token no sequence stops early, and no logits processor spends time suppressing it.
        self.model.generation_config = GenerationConfig(pad_token_id=0)

    @torch.inference_mode()
    def generate(self, requests: Sequence[BenchRequest], temperature: float = 0.0) -> list[list[int]]:
        """Run one static batch and return each request's output tokens, cut to its length."""
        width = max(len(request.prompt) for request in requests)
        longest = max(request.output_tokens for request in requests)
        padding = [width - len(request.prompt) for request in requests]
        rows = zip(requests, padding, strict=True)
        ids = torch.tensor([[0] * pad + request.prompt for request, pad in rows], device=self.device)
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding], device=self.device)
        choice: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            choice = {"do_sample": True, "temperature": temperature, "top_k": 0}
        generate = self.model.generate  # a mixin's method, which the class's types take for a tensor
        out = generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest, **choice)
        return self._cut(out[:, width:].tolist(), requests)


class CTranslate2Generate(Peer):
    """CTranslate2's `generate_batch` on the CPU, with the weights converted to its own format, not stopped by EOS."""

    name = "ctranslate2"

    def _load(self, source: Path | str, dtype: str, load_format: str) -> None:
        if find_spec("ctranslate2") is None:
            raise MissingPackage("No module named 'ctranslate2': this comparison needs `pip install ctranslate2`")
        if self.device != "cpu" or load_format == "dummy":
            raise ConfigError("ctranslate2 is compared on a CPU, with the weights of a model's directory")
        from ctranslate2 import Generator
        from ctranslate2.converters import TransformersConverter

        with TemporaryDirectory() as folder:
            converted = Path(folder) / "model"
            TransformersConverter(str(source)).convert(str(converted))
            self.words = json.loads((converted / "vocabulary.json").read_text(encoding="utf-8"))
            threads = torch.get_num_threads()
            self.model = Generator(str(converted), compute_type=dtype, inter_threads=1, intra_threads=threads)

    def generate(self, requests: Sequence[BenchRequest], temperature: float = 0.0) -> list[list[int]]:
        """Run one static batch and return each request's output tokens, cut to its length."""
        longest = max(request.output_tokens for request in requests)
        choice: dict[str, Any] = {"sampling_topk": 1}
        if temperature > 0:
            choice = {"sampling_topk": 0, "sampling_temperature": temperature}
        results = self.model.generate_batch(
            [[self.words[token] for token in request.prompt] for request in requests],
            min_length=longest,
            max_length=longest,
            include_prompt_in_result=False,
            **choice,
        )
        return self._cut([each.sequences_ids[0] for each in results], requests)


PEERS: dict[str, type[Peer]] = {each.name: each for each in (TransformersGenerate, CTranslate2Generate)}


def batch_sizes(requests: int) -> tuple[int, ...]:
    """Static batch sizes to try: 1 for a single request, else 8, 16, ... up to the first that holds all, at most 64."""
    if requests == 1:
        return (1,)
    return tuple(batch for i, batch in enumerate(BATCHES) if i == 0 or BATCHES[i - 1] < requests)


def _random_model(source: Path | str, dtype: torch.dtype, device: str) -> "PreTrainedModel":
    """transformers' model of the same shape with random weights: speed does not depend on their values."""
    from transformers import AutoConfig, AutoModelForCausalLM, GemmaConfig

    if isinstance(source, str):
        from minillm.model.config import PRESETS

        config = _gemma_config(GemmaConfig, PRESETS[source])
    else:
        config = AutoConfig.from_pretrained(source)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _gemma_config(kind: type["GemmaConfig"], config: ModelConfig) -> "GemmaConfig":
    if config.architecture != "GemmaForCausalLM":
        raise ConfigError(
            f"a preset of {config.architecture} cannot be made in transformers here: name a model's directory instead"
        )
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
