"""A decode step of one request with five launches per layer.  Lesson 11.

The same operations in the same order as `Model.forward`, for a batch of one row that decodes one token;
`kernels/single_row.py` explains what is fused and why. It bypasses the operations of `ops/`, so it runs only while all
of them are the engine's own.
"""

from typing import NamedTuple, Self

from torch import Tensor

from minillm.kernels import single_row
from minillm.kv_cache.layer_cache import LayerCache
from minillm.ops.signatures import AttentionOptions
from minillm.quantization import DenseWeight, Int8Weight, Weight

from .batch import Batch
from .decoder import PROJECTIONS, Model


class _Matrix(NamedTuple):
    """A projection as the kernels take it: a dense matrix, or int8 codes with a scale for each row."""

    weight: Tensor
    scales: Tensor | None

    @classmethod
    def of(cls, weight: Weight) -> Self:
        if isinstance(weight, Int8Weight):
            return cls(weight.codes, weight.scales)
        return cls(weight.dequantize(), None)


class _Matrices(NamedTuple):
    """One layer's projections."""

    qkv: _Matrix
    attention_out: _Matrix
    gate_up: _Matrix
    down: _Matrix


class SingleRow:
    """One model's fused decode step. `fits` says which models have one."""

    def __init__(self, model: Model):
        self.model = model
        shape = model.config
        self.attend = single_row.RowAttention(shape.num_heads, shape.num_kv_heads, shape.head_dim, model.device)
        self.head = _Matrix.of(model.head)
        self.matrices = [
            _Matrices(*(_Matrix.of(getattr(layer, name)) for name in PROJECTIONS)) for layer in model.layers
        ]

    @staticmethod
    def fits(model: Model) -> bool:
        """Whether the fused kernels support a model: Gemma, Llama 2 and 3, and models with the same parts."""
        shape = model.config
        return (
            set(model.layer_norms) == {"attention_norm", "mlp_norm"}
            and all(_fits(weight) for weight in model.weights())
            and all(layer.attention == AttentionOptions(layer.attention.scale) for layer in model.layers)
            and shape.final_soft_cap is None
            and not shape.rotations
            and shape.hidden_size <= single_row.WHOLE
            and 16 <= shape.head_dim <= 256
            and shape.head_dim & (shape.head_dim - 1) == 0
        )

    def logits(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """The logits [1, vocab], in the model's dtype, of a batch with one decode row.

        Writes the row's keys and values to the caches. Raises ValueError without a decode row.
        """
        model, rows = self.model, batch.decode
        if rows is None:
            raise ValueError("the fused decode step needs a batch with one decode row; this batch has none")
        eps, activation = model.config.rms_norm_eps, model.config.activation
        x = model.ops.embedding(batch.token_ids, model.embedding, model.embedding_scale)
        cos_sin = model.rotary[batch.positions]
        residual: Tensor | None = None  # the first layer has none to add
        for layer, matrices, cache in zip(model.layers, self.matrices, caches, strict=True):
            qkv, total = single_row.product(
                x,
                matrices.qkv.weight,
                scales=matrices.qkv.scales,
                norm=layer.attention_norm,
                eps=eps,
                residual=residual,
            )
            residual = x if total is None else total
            table = rows.block_table[layer.group]
            x = self.attend(qkv, cos_sin, cache, table, rows.lengths, layer.attention.scale)
            x, _ = single_row.product(x, matrices.attention_out.weight, scales=matrices.attention_out.scales)
            x, residual = single_row.product(
                x,
                matrices.gate_up.weight,
                scales=matrices.gate_up.scales,
                norm=layer.mlp_norm,
                eps=eps,
                residual=residual,
                activation=activation,
            )
            x, _ = single_row.product(x, matrices.down.weight, scales=matrices.down.scales)
        logits, _ = single_row.product(
            x, self.head.weight, scales=self.head.scales, norm=model.final_norm, eps=eps, residual=residual
        )
        return logits


def _fits(weight: Weight) -> bool:
    """Whether the kernels read a weight: dense, or int8 with rows of whole words, without a bias."""
    if weight.bias is not None or weight.activations is not None:
        return False
    return isinstance(weight, DenseWeight) or (isinstance(weight, Int8Weight) and weight.shape[1] % 4 == 0)
