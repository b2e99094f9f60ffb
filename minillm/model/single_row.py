"""A decode step of one request in five launches a layer.  Lesson 03.

The same parts in the same order as `Model.forward`, for a batch of one row that decodes one token;
`kernels/single_row.py` says what is fused and why. It stands beside the operations of `ops/`, not among them: it runs
only while all of them are the engine's own.
"""

from torch import Tensor

from minillm.kernels import single_row
from minillm.kv_cache.storage import LayerCache
from minillm.ops.signatures import AttentionOptions
from minillm.quantization import DenseWeight

from .batch import Batch
from .decoder import Model


class SingleRow:
    """The fused form of one model's decode step; see `fits` for which models have one."""

    def __init__(self, model: Model):
        self.model = model
        shape = model.config
        self.attend = single_row.RowAttention(shape.num_heads, shape.num_kv_heads, shape.head_dim, model.device)

    @staticmethod
    def fits(model: Model) -> bool:
        """Whether the model is made of the parts that the fused kernels know: Gemma, Llama 2 and 3 and their like."""
        shape = model.config
        return (
            set(model.layer_norms) == {"attention_norm", "mlp_norm"}
            and all(type(weight) is DenseWeight and weight.bias is None for weight in model.weights())
            and all(layer.attention == AttentionOptions(layer.attention.scale) for layer in model.layers)
            and shape.final_soft_cap is None
            and shape.hidden_size <= single_row.WHOLE
            and 16 <= shape.head_dim <= 256
            and shape.head_dim & (shape.head_dim - 1) == 0
        )

    def logits(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """[1, vocab], in the model's dtype, of a batch with one decode row; writes its key and value to the caches."""
        model, rows = self.model, batch.decode
        eps, activation = model.config.rms_norm_eps, model.config.activation
        x = total = model.ops.embedding(batch.token_ids, model.embedding, model.embedding_scale)
        turns = model.rotary[batch.positions]
        before = {}  # the first layer has nothing to add
        for layer, cache in zip(model.layers, caches, strict=True):
            qkv, summed = single_row.product(x, layer.qkv.weight, norm=layer.attention_norm, eps=eps, **before)
            total = total if summed is None else summed
            table = rows.block_table[layer.group]
            x = self.attend(qkv, turns, cache, table, rows.lengths, layer.attention.scale)
            x, _ = single_row.product(x, layer.attention_out.weight)
            x, total = single_row.product(
                x, layer.gate_up.weight, norm=layer.mlp_norm, eps=eps, residual=total, activation=activation
            )
            x, _ = single_row.product(x, layer.down.weight)
            before = {"residual": total}
        logits, _ = single_row.product(x, model.head.weight, norm=model.final_norm, eps=eps, **before)
        return logits
