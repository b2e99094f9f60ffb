"""One decoder for all model families: `ModelConfig` selects from the same few parts.  Lesson 02.

tokens -> embedding -> [norm -> attention -> + -> norm -> gated MLP -> +] x layers -> norm -> head -> logits,
with more norms in some families: after attention and MLP (Gemma 2 and 3), of queries and keys (Gemma 3, Qwen 3).
`ops/reference.py` defines what each operation computes; this file defines their order.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from minillm import ops
from minillm.kv_cache.layer_cache import CacheSpec, LayerCache
from minillm.ops.signatures import AttentionOptions
from minillm.quantization import Recipe, Weight, weight_only

from .batch import Batch
from .config import ModelConfig
from .families import ARCHITECTURES, QK_NORMS
from .parallel import OneDevice, Parallel

PROJECTIONS = ("qkv", "attention_out", "gate_up", "down")


@dataclass
class Layer:
    """One decoder layer's parameters. Projections that read the same input are one matrix."""

    attention_norm: Tensor  # [hidden]
    qkv: Weight  # [(heads + 2 * kv_heads) * head_dim, hidden]
    attention_out: Weight  # [hidden, heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Weight  # [2 * intermediate, hidden]
    down: Weight  # [hidden, intermediate]
    attention: AttentionOptions
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None  # [head_dim]
    after_attention_norm: Tensor | None = None  # [hidden]
    after_mlp_norm: Tensor | None = None  # [hidden]
    local: bool = False  # whether its rotary embedding uses `Model.local_rotary`
    group: int = 0  # index of this layer's group in `Batch.slots`, `decode` and `prefill`


class Places(NamedTuple):
    """Where the tokens of a batch are: the angles of their positions, and their slots in the cache."""

    cos_sin: Tensor  # [tokens, 2, head_dim]
    local_cos_sin: Tensor  # the same for layers that are `local`
    slots: tuple[Tensor, ...]  # of each layer group: [tokens] int64


class Model:
    """A decoder's parameters and its forward pass.  Lesson 02.

    It keeps no state between calls: attention's inputs are in a `Batch`, keys and values in `LayerCache`s. Parameters
    are allocated here, in the formats that `recipe` names, and filled by `loader`. `cache_spec` is the format of each
    layer's cache, which `kv_cache_dtype` names ("auto": the model's dtype). `parallel` connects it to the shards on
    other GPUs: `config` is the whole model's shape, `local` that of the shard here. Raises ConfigError for an unknown
    cache format, and for sizes that the GPUs cannot share evenly.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: str | torch.device,
        max_model_len: int,
        recipe: Recipe = Recipe(),
        kv_cache_dtype: str = "auto",
        parallel: Parallel = OneDevice(),
    ):
        self.parallel, self.local = parallel, config.shard(parallel.size)
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.max_model_len = max_model_len
        self.ops = ops.on(self.device.type)
        self.cache_spec = CacheSpec.of(kv_cache_dtype, self.local.num_kv_heads, config.head_dim, dtype)
        hidden, head_dim, inner = config.hidden_size, config.head_dim, self.local.intermediate_size
        query_size, kv_size = self.local.num_heads * head_dim, self.local.num_kv_heads * head_dim
        # transformers multiplies by Gemma's norm weights in float32 for every dtype, by Llama's in the model's dtype.
        norm_dtype = torch.float64 if dtype == torch.float64 and not config.norm_offset else torch.float32

        def matrix(address: str, out: int, inputs: int, bias: bool = False) -> Weight:
            format = recipe.format(address)
            tied = address == "head" and config.tie_word_embeddings
            static = format.activations is not None and format.activations.static
            if address == "embedding" or (tied and static):
                format = weight_only(format)  # rows are gathered; checkpoints have no scale for a tied head's inputs
            return format.empty(out, inputs, bias, dtype=dtype, device=self.device)

        def norm(size: int = hidden) -> Tensor:
            return torch.empty(size, dtype=norm_dtype, device=self.device)

        self.head = matrix("head", self.local.vocab_size, hidden)
        self.embedding = self.head
        if not config.tie_word_embeddings:
            self.embedding = matrix("embedding", self.local.vocab_size, hidden)
        self.head_tokens: Tensor | None = None  # [n] int64: of the head's rows, after `cut_head`
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.layer_norms = tuple(ARCHITECTURES[config.architecture].norms)
        self.groups = config.groups(max_model_len)
        scale = config.attention_scale or head_dim**-0.5
        self.layers = [
            Layer(
                qkv=matrix(
                    f"layers.{index}.qkv", query_size + 2 * kv_size, hidden, config.attention_bias or config.qkv_bias
                ),
                attention_out=matrix(f"layers.{index}.attention_out", hidden, query_size, config.attention_bias),
                gate_up=matrix(f"layers.{index}.gate_up", 2 * inner, hidden, config.mlp_bias),
                down=matrix(f"layers.{index}.down", hidden, inner, config.mlp_bias),
                attention=AttentionOptions(scale, self.groups.windows[group], config.attention_soft_cap),
                local=bool(window and config.local_rope_theta),
                group=group,
                **{name: norm(head_dim if name in QK_NORMS else hidden) for name in self.layer_norms},
            )
            for index, (window, (group, _)) in enumerate(
                zip(config.windows or (None,) * config.num_layers, self.groups.places, strict=True)
            )
        ]
        self.final_norm = norm()
        self.rotary = rotary_table(config, max_model_len, dtype=dtype, device=self.device)
        self.local_rotary = None
        if config.local_rope_theta:
            local = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
            self.local_rotary = rotary_table(local, max_model_len, dtype=dtype, device=self.device)

    def forward(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """The final hidden states of the tokens in `batch.logits_index` (None: all): [samples, hidden].

        caches: one per layer; layers of different groups may share one, since they use different blocks. Each layer
        writes its tokens' keys and values to its cache before it attends to them.
        """
        residual, places = self.embed(batch), self.places(batch)
        x: Tensor | None = None
        for layer, cache in zip(self.layers, caches, strict=True):
            # After the last attention the other tokens are no longer needed.
            wanted = batch.logits_index if layer is self.layers[-1] else None
            x, residual = self.run_layer(layer, x, residual, batch, places, cache, wanted)
        if "residual" in self.config.rotations:
            x, residual = None, self.ops.hadamard(residual if x is None else residual + x, inverse=True)
        return self.ops.normed(x, residual, self.final_norm, self.config.rms_norm_eps)[0]

    def embed(self, batch: Batch) -> Tensor:
        """The residual stream before the first layer: [tokens, hidden]."""
        ids, rows = batch.token_ids, self.local.vocab_size
        if self.parallel.size == 1:
            found = self.ops.embedding(ids, self.embedding, self.embedding_scale)
        else:  # each token is in one rank's table
            ids = ids - self.parallel.rank * rows
            here = (ids >= 0) & (ids < rows)
            found = self.ops.embedding(ids.where(here, 0), self.embedding, self.embedding_scale)
            found = self.parallel.all_reduce(found.masked_fill(~here[:, None], 0))
        return self.ops.hadamard(found) if "residual" in self.config.rotations else found

    def places(self, batch: Batch) -> Places:
        """Look up where the tokens of a batch are, for all layers."""
        cos_sin = self.rotary[batch.positions]
        local = cos_sin if self.local_rotary is None else self.local_rotary[batch.positions]
        return Places(cos_sin, local, batch.slots.unbind())

    def run_layer(
        self,
        layer: Layer,
        x: Tensor | None,
        residual: Tensor,
        batch: Batch,
        places: Places,
        cache: LayerCache,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one decoder layer. Returns its output and the residual stream, which are not added yet.

        x, residual: the results of the layer before, [tokens, hidden]; before the first layer, x is None. The norm that
        follows adds them, because it computes the sum and its norm in one step.
        wanted: [samples] int64, the tokens whose states are returned; None: all.
        """
        run, eps = self.ops, self.config.rms_norm_eps
        qkv, residual = run.normed_linear(x, residual, layer.attention_norm, eps, layer.qkv)
        x = self._attention(layer, qkv, batch, places, cache)
        if wanted is not None:
            x, residual = x[wanted], residual[wanted]
        x = self.parallel.all_reduce(x)
        if layer.after_attention_norm is not None:
            x = run.rms_norm(x, layer.after_attention_norm, eps)
        gate_up, residual = run.normed_linear(x, residual, layer.mlp_norm, eps, layer.gate_up)
        if "down" in self.config.rotations:
            x = run.linear(run.hadamard(run.gated_activation(gate_up, self.config.activation)), layer.down)
        else:
            x = run.gated_linear(gate_up, self.config.activation, layer.down)
        x = self.parallel.all_reduce(x)
        if layer.after_mlp_norm is not None:
            x = run.rms_norm(x, layer.after_mlp_norm, eps)
        return x, residual

    def _attention(self, layer: Layer, qkv: Tensor, batch: Batch, places: Places, cache: LayerCache) -> Tensor:
        run, heads, kv_heads = self.ops, self.local.num_heads, self.local.num_kv_heads
        q, k, v = qkv.unflatten(1, (-1, self.config.head_dim)).split((heads, kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            eps = self.config.rms_norm_eps
            q, k = run.rms_norm(q, layer.q_norm, eps), run.rms_norm(k, layer.k_norm, eps)
        cos_sin = places.local_cos_sin if layer.local else places.cos_sin
        q = run.rotary_write(q, k, v, cos_sin, cache, places.slots[layer.group], not batch.streams)
        options = replace(layer.attention, rotary=self.rotary) if batch.streams else layer.attention
        parts, decodes = [], 0
        if batch.decode:
            rows = batch.decode[layer.group]
            decodes = rows.lengths.shape[0] * rows.max_queries
            by_row = q[:decodes].unflatten(0, (-1, rows.max_queries))
            parts.append(run.decode_attention(by_row, cache, rows, options).flatten(0, 1))
        if batch.prefill:
            parts.append(run.prefill_attention(q[decodes:], cache, batch.prefill[layer.group], options))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return run.linear(attended.flatten(1), layer.attention_out)

    def logits(self, hidden: Tensor) -> Tensor:
        """[samples, hidden] after `forward` -> [samples, vocab], float32 (float64 for a float64 model)."""
        return self.parallel.all_gather(self.own_logits(hidden))

    def own_logits(self, hidden: Tensor) -> Tensor:
        """The same of this rank's part of the vocabulary."""
        cap = self.config.final_soft_cap
        found = self.ops.lm_head(hidden, self.head, cap) if cap else self.ops.lm_head(hidden, self.head)
        return self.of_all_tokens(found)

    def of_all_tokens(self, logits: Tensor) -> Tensor:
        """The head's logits [samples, rows of the head] -> those of the vocabulary: [samples, vocab]."""
        if self.head_tokens is None:
            return logits
        found = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return found.index_copy_(1, self.head_tokens, logits)

    def norms(self) -> list[Tensor]:
        """The weights of all norms. The loader adds the family's offset to them."""
        return [self.final_norm, *(getattr(layer, name) for layer in self.layers for name in self.layer_norms)]

    def addressed(self) -> dict[str, Weight]:
        """Every weight once, by its address in a recipe; a tied head is the embedding."""
        found = {"head": self.head} if self.head is self.embedding else {"embedding": self.embedding, "head": self.head}
        for index, layer in enumerate(self.layers):
            found |= {f"layers.{index}.{name}": getattr(layer, name) for name in PROJECTIONS}
        return found

    def weights(self) -> Iterator[Weight]:
        """Every weight once; a tied head is the embedding."""
        yield from self.addressed().values()

    def tensors(self) -> list[Tensor]:
        """All stored tensors, each once, without the rotary tables."""
        return [*(tensor for weight in self.weights() for tensor in weight.stored()), *self.norms()]

    @property
    def num_parameters(self) -> int:
        """The number of parameters; a tied head counts once."""
        biases = [weight.bias for weight in self.weights() if weight.bias is not None]
        numbers = sum(weight.shape.numel() for weight in self.weights())
        return numbers + sum(tensor.numel() for tensor in (*self.norms(), *biases))

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, without the rotary tables."""
        return sum(tensor.nbytes for tensor in self.tensors())


def rotary_table(config: ModelConfig, length: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cosines and signed sines of every position's angles: [length, 2, head_dim].  Lesson 02.

    Su et al. 2021, section 3.4.2, with the pairs (i, i + head_dim / 2). Angles are float32 for every dtype,
    as in transformers. The sines of the first half are negated: a rotated pair is (a cos - b sin, b cos + a sin).
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = _scaled(1.0 / (config.rope_theta**exponents), config)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return table.to(dtype=dtype, device=device)


def _scaled(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Lower the frequencies as `config.rope_scaling` says, so that long contexts keep the trained range of angles."""
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    # Llama 3: divide the frequencies of long waves by `factor`, keep those of short waves, interpolate in between.
    trained = scaling.original_max_position_embeddings
    waves = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (trained / waves - low) / (high - low)
    between = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(waves > trained / low, frequencies / scaling.factor, between)
    return torch.where(waves < trained / high, frequencies, stretched)
