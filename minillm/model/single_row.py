"""A decode step of one request with five launches per layer.  Lesson 11.

The same operations in the same order as `Model.forward`, for a batch of one row that decodes one token;
`kernels/single_row.py` explains what is fused and why. What the row's adapter adds to dense weights is in the same
launches (`kernels/adapted_row.py`); without adapters the step runs the kernels that know nothing of them. It bypasses
the operations of `ops/`, so it runs only while all of them are the engine's own.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minillm.kernels import adapted_row, fp8_rows, integer_rows, peers, single_row
from minillm.kernels.adapted_row import LowRankTerm
from minillm.kernels.arguments import CodeMatrix
from minillm.kv_cache.layer_cache import LayerCache
from minillm.ops.signatures import Adapted, LowRank
from minillm.quantization import DenseWeight, Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight, Weight

from .batch import Batch
from .decoder import PROJECTIONS, Model

Matrix = Tensor | CodeMatrix  # a projection as the kernels take it


class _Matrices(NamedTuple):
    """One layer's projections."""

    qkv: Matrix
    attention_out: Matrix
    gate_up: Matrix
    down: Matrix


class SingleRow:
    """One model's fused decode step. `fits` says which models have one.

    factors: those of adapters, by the id() of their weights. A batch with adapters has the same, and only if
    `takes_adapters`.
    """

    def __init__(self, model: Model, factors: Mapping[int, LowRank] | None = None):
        self.model = model
        shape = model.local
        # Of the sums over ranks: the embedding, then two a layer.
        self.inboxes = model.parallel.inboxes(1 + 2 * shape.num_layers, shape.hidden_size)
        self.attend = single_row.RowAttention(shape.num_heads, shape.num_kv_heads, shape.head_dim, model.device)
        self.head = _matrix(model.head)
        self.matrices = [_Matrices(*(_matrix(getattr(layer, name)) for name in PROJECTIONS)) for layer in model.layers]
        dense = all(isinstance(each, Tensor) for layer in self.matrices for each in layer)
        self.takes_adapters = dense and self.inboxes is None
        # Allocated before steps are captured: they hold the numbers of steps, and graphs overwrite each other's memory.
        self.step = torch.zeros(1, dtype=torch.int32, device=model.device)
        self.inner = {
            weight: torch.zeros(adapted_row.words(*each.down.shape[:0:-1]), dtype=torch.int64, device=model.device)
            for weight, each in (factors or {}).items()
        }

    @staticmethod
    def fits(model: Model) -> bool:
        """Return whether the fused kernels support a model's sizes and the formats of its weights."""
        shape = model.config
        return (
            (model.parallel.size == 1 or _dense(model) and model.parallel.connected)
            and all(_fits(weight, model.device) for weight in model.weights())
            and model.parallel.share.of == 1
            and not shape.rotations
            and shape.hidden_size <= single_row.WHOLE
            and 16 <= shape.head_dim <= 256
            and shape.head_dim & (shape.head_dim - 1) == 0
        )

    def logits(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """Return the logits [1, vocab], in the model's dtype, of a batch with one decode row.

        Writes the row's keys and values to the caches. Raises ValueError without a decode row, and for a batch with
        adapters unless `takes_adapters`.
        """
        model, adapted = self.model, batch.adapted
        if not batch.decode:
            raise ValueError("the fused decode step needs a batch with one decode row; this batch has none")
        if adapted is not None:
            if not self.takes_adapters:
                raise ValueError("the fused decode step takes adapters of dense weights on one device alone")
            self.step += 1
        eps, activation = model.config.rms_norm_eps, model.config.activation
        x = self._embedding(batch.token_ids)
        residual: Tensor | None = None  # the first layer has none to add
        post_norm: Tensor | None = None  # of the layer before
        for index, (layer, matrices, cache) in enumerate(zip(model.layers, self.matrices, caches, strict=True)):
            qkv, total = _product(
                x, matrices.qkv, self._term(layer.qkv, adapted), bias=layer.qkv.bias, norm=layer.attention_norm,
                eps=eps, residual=residual, post_norm=post_norm,
            )  # fmt: skip
            residual = x if total is None else total
            rows = batch.decode[layer.group]
            rotary = model.local_rotary if layer.local and model.local_rotary is not None else model.rotary
            x = self.attend(
                qkv, rotary, cache, rows.block_table, rows.lengths, layer.attention,
                q_norm=layer.q_norm, k_norm=layer.k_norm, eps=eps,
            )  # fmt: skip
            x = self._summed(1 + 2 * index, x, matrices.attention_out, layer.attention_out, adapted)
            x, residual = _product(
                x, matrices.gate_up, self._term(layer.gate_up, adapted), bias=layer.gate_up.bias, norm=layer.mlp_norm,
                eps=eps, residual=residual, post_norm=layer.after_attention_norm, activation=activation,
            )  # fmt: skip
            x = self._summed(2 + 2 * index, x, matrices.down, layer.down, adapted)
            post_norm = layer.after_mlp_norm
        logits, _ = _product(
            x, self.head, norm=model.final_norm, eps=eps, residual=residual, post_norm=post_norm,
            soft_cap=model.config.final_soft_cap,
        )  # fmt: skip
        return model.parallel.all_gather(model.of_all_tokens(logits))

    def _embedding(self, ids: Tensor) -> Tensor:
        """Return the residual stream before the first layer [1, hidden]."""
        model = self.model
        if self.inboxes is None:
            return model.ops.embedding(ids, model.embedding, model.embedding_scale)
        first, table = model.parallel.rank * model.local.vocab_size, model.embedding.dequantize()  # dense: no copy
        peers.send_embedding(ids, table, model.embedding_scale, first, self._outbox(0))
        return self._received(0)

    def _term(self, weight: Weight, adapted: Adapted | None) -> LowRankTerm | None:
        """Return the term that adapters add to the product of a weight; None if they add none."""
        if adapted is None or (factors := adapted.factors.get(id(weight))) is None:
            return None
        return LowRankTerm(adapted.slots, *factors, self.inner[id(weight)], self.step)

    def _summed(self, number: int, x: Tensor, matrix: Matrix, weight: Weight, adapted: Adapted | None) -> Tensor:
        """Return a product of which each rank computes a part: [1, hidden]. number: which of a step's sums this is."""
        if self.inboxes is None:
            return _product(x, matrix, self._term(weight, adapted), bias=weight.bias)[0]
        _product(x, matrix, bias=weight.bias, outbox=self._outbox(number))
        return self._received(number)

    def _received(self, number: int) -> Tensor:
        assert self.inboxes is not None, "one GPU receives nothing"
        size, dtype, first = self.model.config.hidden_size, self.model.dtype, number == 0
        return peers.summed(self.inboxes.own[number], self._outbox(number), size, dtype, first=first)

    def _outbox(self, number: int) -> peers.Outbox:
        """Return the destination of this rank's part of a sum."""
        assert self.inboxes is not None, "one GPU sends nothing"
        own, addresses, epoch = self.inboxes
        _, ranks, width = own.shape
        return peers.Outbox(addresses, epoch, (number * ranks + self.model.parallel.rank) * width)


def _product(
    x: Tensor, matrix: Matrix, term: LowRankTerm | None = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    if term is not None and isinstance(matrix, Tensor):
        return adapted_row.product(x, matrix, term, **options)
    if isinstance(matrix, CodeMatrix):
        return (fp8_rows if matrix.fp8 else integer_rows).product(x, matrix, **options)
    return single_row.product(x, matrix, **options)


def _matrix(weight: Weight) -> Matrix:
    matrix = weight.matrix if isinstance(weight, QuantizedWeight) else None
    return weight.dequantize() if matrix is None else matrix


def _dense(model: Model) -> bool:
    """Return whether all weights are dense: the kernels of other formats send nothing to other GPUs."""
    return all(isinstance(weight, DenseWeight) and weight.activations is None for weight in model.weights())


def _fits(weight: Weight, device: torch.device) -> bool:
    """Return whether the kernels read a weight: dense, int8, fp8, or int4 in the order of its inputs."""
    columns = weight.shape[1]
    inputs = None if weight.activations is None else weight.activations.kind
    if isinstance(weight, Int8Weight):
        return inputs in (None, "int8") and integer_rows.takes(columns, 8, columns)
    if isinstance(weight, Fp8Weight):
        return inputs in (None, "fp8") and fp8_rows.takes(columns, weight.dtype, device)
    if weight.activations is not None:
        return False
    if isinstance(weight, Int4Weight):
        return weight.order is None and integer_rows.takes(columns, 4, weight.group_size)
    return isinstance(weight, DenseWeight)
