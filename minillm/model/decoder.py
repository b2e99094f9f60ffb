"""One decoder for all model families: `ModelConfig` selects from the same few parts.  Lesson 02.

tokens -> embedding -> [norm -> attention -> + -> norm -> gated MLP -> +] x layers -> norm -> head -> logits,
with more norms in some families: after attention and MLP (Gemma 2 and 3), of queries and keys (Gemma 3, Qwen 3).
`ops/reference.py` defines what each operation computes; this file defines their order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from minillm import ops
from minillm.kv_cache.layer_cache import CacheSpec, LayerCache
from minillm.ops.signatures import Adapted, AttentionOptions, Unadded
from minillm.quantization import Recipe, Weight, weight_only

from .batch import Batch
from .config import ModelConfig
from .families import ARCHITECTURES, QK_NORMS
from .parallel import OneDevice, Parallel, received, sent, sharded_embedding, summed_normed_linear
from .rotary import rotary_table
from .split_attention import split_attention

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


class TokenMetadata(NamedTuple):
    """Computed once for all layers: the angles of the tokens' positions, and their slots in the cache."""

    cos_sin: Tensor  # [tokens, 2, head_dim]
    local_cos_sin: Tensor  # the same for layers that are `local`
    slots: tuple[Tensor, ...]  # of each layer group: [tokens] int64


class Model:
    """A decoder's parameters and its forward pass.  Lesson 02.

    It keeps no state between calls: attention's inputs are in a `Batch`, keys and values in `LayerCache`s. Parameters
    are allocated here, in the formats that `recipe` names, and filled by `loader`. `cache_spec` is the format of each
    layer's cache, which `kv_cache_dtype` names ("auto": the model's dtype). `parallel` connects it to the shards on
    other GPUs: `config` is the whole model's shape, `local` that of the shard here. Raises ConfigError for an unknown
    cache format, and for sizes that the GPUs cannot share evenly. `layers` are those of this stage of a pipeline, with
    the numbers in `held`; where a stage needs no embedding or head, these have no rows.
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
        stage, self.held = parallel.stage, parallel.stage.layers(config.num_layers)
        self.partial = parallel.size > 1 and "after_mlp_norm" not in ARCHITECTURES[config.architecture].norms
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.max_model_len = max_model_len
        self.ops = ops.on(self.device.type)
        whole = CacheSpec.of(kv_cache_dtype, self.local.num_kv_heads, config.head_dim, dtype)
        self.cache_spec = parallel.share.spec(whole)
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

        tied, vocab = config.tie_word_embeddings, self.local.vocab_size
        self.head = matrix("head", vocab if stage.last or tied and stage.first else 0, hidden)
        self.embedding = self.head if tied else matrix("embedding", vocab if stage.first else 0, hidden)
        self.head_tokens: Tensor | None = None  # [n] int64: of the head's rows, after `cut_head`
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.layer_norms = tuple(ARCHITECTURES[config.architecture].norms)
        self.groups = stage.groups(config.groups(max_model_len))
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
                local=bool(config.local_rope_theta and config.windows and config.windows[index]),
                group=group,
                **{name: norm(head_dim if name in QK_NORMS else hidden) for name in self.layer_norms},
            )
            for index, (group, _) in zip(self.held, self.groups.of_layer, strict=True)
        ]
        self.final_norm = norm()
        self.rotary = rotary_table(config, max_model_len, dtype=dtype, device=self.device)
        self.local_rotary = None
        if config.local_rope_theta:
            local = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
            self.local_rotary = rotary_table(local, max_model_len, dtype=dtype, device=self.device)

    def forward(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """Return the final hidden states of the tokens in `batch.logits_index` (None: all): [samples, hidden].

        In the last stage of a pipeline; what the others return means nothing, as they send it to the next one.
        caches: one per layer; layers of different groups may share one, since they use different blocks. Each layer
        writes its tokens' keys and values to its cache before it attends to them.
        """
        metadata, stage = self.metadata(batch), self.parallel.stage
        x: Tensor | Unadded | None
        x, residual = received(self.parallel, lambda: self.embed(batch), batch.token_ids, self.config, self.dtype)
        for layer, cache in zip(self.layers, caches, strict=True):
            # After the last attention the other tokens are no longer needed.
            wanted = batch.logits_index if stage.last and layer is self.layers[-1] else None
            x, residual = self.run_layer(layer, x, residual, batch, metadata, cache, wanted)
        if x is not None and not stage.last:
            return sent(self.parallel, self.ops.added(x), residual)
        if x is not None and self.partial:
            x = self.parallel.all_reduce(self.ops.added(x))
        if "residual" in self.config.rotations:
            x, residual = None, self.ops.hadamard(residual if x is None else residual + self.ops.added(x), inverse=True)
        return self.ops.normed(x, residual, self.final_norm, self.config.rms_norm_eps)[0]

    def embed(self, batch: Batch) -> Tensor:
        """Return the residual stream before the first layer: [tokens, hidden]."""
        ids, rows, scale = batch.token_ids, self.local.vocab_size, self.embedding_scale
        if batch.embedded is not None:
            ids = ids.clamp(min=0)
        embedded = sharded_embedding(self.parallel, self.ops, ids, self.embedding, rows, scale)
        if batch.embedded is not None:
            embedded = embedded.index_copy(0, batch.embedded[0], batch.embedded[1].to(embedded.dtype))
        return self.ops.hadamard(embedded) if "residual" in self.config.rotations else embedded

    def metadata(self, batch: Batch) -> TokenMetadata:
        """Look up what attention needs of the batch's tokens, for all layers."""
        cos_sin = self.rotary[batch.positions]
        local = cos_sin if self.local_rotary is None else self.local_rotary[batch.positions]
        return TokenMetadata(cos_sin, local, self.parallel.share.slots(batch.slots).unbind())

    def run_layer(
        self,
        layer: Layer,
        x: Tensor | Unadded | None,
        residual: Tensor,
        batch: Batch,
        metadata: TokenMetadata,
        cache: LayerCache,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor | Unadded, Tensor]:
        """Run one decoder layer. Returns its output and the residual stream, which are not added yet.

        With `partial`, x is this rank's part of a sum over all ranks, both the argument and the result.

        x, residual: the results of the layer before, [tokens, hidden]; before the first layer, x is None. The norm that
        follows adds them, because it computes the sum and its norm in one step.
        wanted: [samples] int64, the tokens whose states are returned; None: all.
        """
        run, eps, adapted, activation = self.ops, self.config.rms_norm_eps, batch.adapted, self.config.activation
        qkv, residual = self._normed_linear(x, residual, layer.attention_norm, layer.qkv, adapted)
        x = self._attention(layer, qkv, batch, metadata, cache)
        if wanted is not None:
            x, residual = run.added(x)[wanted], residual[wanted]
            adapted = adapted and adapted.only(wanted)
        if layer.after_attention_norm is not None:
            x = run.rms_norm(self.parallel.all_reduce(run.added(x)), layer.after_attention_norm, eps)
        if adapted is not None and not self.partial:
            normed, residual = run.normed(x, residual, layer.mlp_norm, eps)
            gated = run.adapted_gate(normed, layer.gate_up, activation, adapted)
            x = run.unadded_linear(gated, layer.down, adapted)
        else:
            product, residual = self._normed_linear(x, residual, layer.mlp_norm, layer.gate_up, adapted)
            gate_up = run.added(product)
            if "down" in self.config.rotations:
                x = run.linear(run.hadamard(run.gated_activation(gate_up, activation)), layer.down)
            else:
                x = run.gated_linear(gate_up, activation, layer.down, adapted)
        if layer.after_mlp_norm is not None:
            x = run.rms_norm(self.parallel.all_reduce(run.added(x)), layer.after_mlp_norm, eps)
        return x, residual

    def _normed_linear(
        self, x: Tensor | Unadded | None, residual: Tensor, norm: Tensor, weight: Weight, adapted: Adapted | None
    ) -> tuple[Tensor | Unadded, Tensor]:
        run, eps = self.ops, self.config.rms_norm_eps
        if x is None or not self.partial:
            return run.normed_linear(x, residual, norm, eps, weight, adapted)
        return summed_normed_linear(self.parallel, run, run.added(x), residual, norm, eps, weight, adapted)

    def _attention(
        self, layer: Layer, qkv: Tensor | Unadded, batch: Batch, metadata: TokenMetadata, cache: LayerCache
    ) -> Tensor | Unadded:
        run, heads, kv_heads = self.ops, self.local.num_heads, self.local.num_kv_heads
        unadded = qkv if isinstance(qkv, Unadded) and layer.q_norm is None else None
        qkv = run.added(qkv) if unadded is None else unadded.out
        q, k, v = qkv.unflatten(1, (-1, self.config.head_dim)).split((heads, kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            eps = self.config.rms_norm_eps
            q, k = run.rms_norm(q, layer.q_norm, eps), run.rms_norm(k, layer.k_norm, eps)
        cos_sin = metadata.local_cos_sin if layer.local else metadata.cos_sin
        slots, keep = metadata.slots[layer.group], bool(batch.prefill and batch.prefill[0].whole)
        q, k = run.rotary_write(q, k, v, cos_sin, cache, slots, not batch.streams, keep, unadded)
        options = replace(layer.attention, rotary=self.rotary) if batch.streams else layer.attention
        if self.parallel.share.of > 1:
            attended = split_attention(self.parallel, run, q, cache, batch, layer.group, options)
            return run.adapted_linear(attended.flatten(1), layer.attention_out, batch.adapted)
        parts, decodes = [], 0
        if batch.decode:
            rows = batch.decode[layer.group]
            decodes = rows.lengths.shape[0] * rows.max_queries
            by_row = q[:decodes].unflatten(0, (-1, rows.max_queries))
            parts.append(run.decode_attention(by_row, cache, rows, options).flatten(0, 1))
        if batch.prefill:
            rows = batch.prefill[layer.group]
            parts.append(run.prompt_attention(q[decodes:], k[decodes:], v[decodes:], cache, rows, options))
        attended = (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)
        return run.unadded_linear(attended, layer.attention_out, batch.adapted)

    def logits(self, hidden: Tensor) -> Tensor:
        """[samples, hidden] after `forward` -> [samples, vocab], float32 (float64 for a float64 model)."""
        return self.parallel.all_gather(self.own_logits(hidden))

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return the same of this rank's part of the vocabulary."""
        cap = self.config.final_soft_cap
        logits = self.ops.lm_head(hidden, self.head, cap) if cap else self.ops.lm_head(hidden, self.head)
        return self.of_all_tokens(logits)

    def of_all_tokens(self, logits: Tensor) -> Tensor:
        """Return the head's logits [samples, rows of the head] -> those of the vocabulary: [samples, vocab]."""
        if self.head_tokens is None:
            return logits
        whole = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.head_tokens, logits)

    def norms(self) -> list[Tensor]:
        """Return the weights of all norms. The loader adds the family's offset to them."""
        return [self.final_norm, *(getattr(layer, name) for layer in self.layers for name in self.layer_norms)]

    def addressed(self) -> dict[str, Weight]:
        """Return every weight that is here once, by its address in a recipe; a tied head is the embedding."""
        named = {"head": self.head} if self.head is self.embedding else {"embedding": self.embedding, "head": self.head}
        named = {address: weight for address, weight in named.items() if weight.shape[0]}
        for index, layer in zip(self.held, self.layers, strict=False):
            named |= {f"layers.{index}.{name}": getattr(layer, name) for name in PROJECTIONS}
        return named

    def weights(self) -> Iterator[Weight]:
        """Yield every weight that is here once; a tied head is the embedding."""
        yield from self.addressed().values()

    def tensors(self) -> list[Tensor]:
        """Return all stored tensors, each once, without the rotary tables."""
        return [*(tensor for weight in self.weights() for tensor in weight.stored()), *self.norms()]

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters; a tied head counts once."""
        biases = [weight.bias for weight in self.weights() if weight.bias is not None]
        numbers = sum(weight.shape.numel() for weight in self.weights())
        return numbers + sum(tensor.numel() for tensor in (*self.norms(), *biases))

    @property
    def nbytes(self) -> int:
        """Return bytes of all parameters, without the rotary tables."""
        return sum(tensor.nbytes for tensor in self.tensors())
