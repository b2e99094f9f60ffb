"""Operations in sequence that a device may run in fewer kernels.  Lessons 07, 08 and 15.

A model calls these where a product reads what a norm or a gated activation has just computed. Each is equivalent to
calling its operations in sequence, including any that `minillm.using` replaced. If the product quantizes its inputs and
all of the operations are the engine's own, the first one writes codes directly, which saves a kernel. Likewise, keys
may be rotated and written to the cache in one kernel, and attention to a new prompt may read them where they were
before that. A device may implement a composition under the same name. It returns None for weights that its kernels do
not support. What adapters add to products is in `adapted.py`.
"""

from torch import Tensor

from minillm.kv_cache.layer_cache import LayerCache
from minillm.quantization import Weight

from .adapted import AdaptedCompositions
from .signatures import Adapted, AttentionOptions, Rows, Truncation, Unadded

COMPOSITIONS = (
    "add_adapted", "product_with_inner", "fits_a_token", "added", "adapted_gate", "normed", "normed_linear",
    "gated_linear", "rotary_write", "prompt_attention", "scored_sample",
)  # fmt: skip


class Compositions(AdaptedCompositions):
    """Sequences of the current operations. The table lists the operations, not the sequences."""

    def normed(self, x: Tensor | Unadded | None, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and the sum. x=None: the norm of the residual alone, and the residual."""
        if x is None:
            return self.rms_norm(residual, norm, eps), residual
        if isinstance(x, Unadded) and self.are_own("add_rms_norm"):
            return self.fused["normed"](x, residual, norm, eps)
        return self.add_rms_norm(self.added(x), residual, norm, eps)

    def normed_linear(
        self,
        x: Tensor | Unadded | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: Weight,
        adapted: Adapted | None = None,
    ) -> tuple[Tensor | Unadded, Tensor]:
        """`normed`, then `unadded_linear`: x, residual [tokens, in], norm [in] -> [tokens, out], and the sum."""
        fused = self.fused.get("normed_linear") if adapted is None else None
        if fused is not None and self.are_own("rms_norm" if x is None else "add_rms_norm", "linear"):
            result = fused(x, residual, norm, eps, weight)
            if result is not None:
                return result
        normed, total = self.normed(x, residual, norm, eps)
        return self.unadded_linear(normed, weight, adapted), total

    def gated_linear(self, gate_up: Tensor, activation: str, weight: Weight, adapted: Adapted | None = None) -> Tensor:
        """`gated_activation`, then `adapted_linear`: gate_up [tokens, 2 * in], weight [out, in] -> [tokens, out]."""
        fused = self.fused.get("gated_linear") if adapted is None else None
        if fused is not None and self.are_own("gated_activation", "linear"):
            result = fused(gate_up, activation, weight)
            if result is not None:
                return result
        return self.adapted_linear(self.gated_activation(gate_up, activation), weight, adapted)

    def rotary_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        cache: LayerCache,
        slots: Tensor,
        rotate_keys: bool,
        keep: bool,
        unadded: Unadded | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`rotary_embedding`, then `write_kv`: q [tokens, heads, d], k and v [tokens, kv_heads, d] -> rotated q and k.

        rotate_keys: whether the cache gets the rotated keys, or k (see `AttentionOptions.rotary`). keep: whether the
        second result is needed; else it may be k. unadded: the product of which q, k and v are the parts.
        """
        fused = self.fused.get("rotary_write")
        if fused is not None and self.are_own("rotary_embedding", "write_kv"):
            more = () if unadded is None else (unadded,)
            result = fused(q, k, v, cos_sin, cache, slots, rotate_keys, keep, *more)
            if result is not None:
                return result
        if unadded is not None:
            self.added(unadded)
        q, rotated = self.rotary_embedding(q, k, cos_sin)
        self.write_kv(rotated if rotate_keys else k, v, cache, slots)
        return q, rotated

    def prompt_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions
    ) -> Tensor:
        """`prefill_attention`, which may read the keys of the last `rows.whole` rows before they were in the cache.

        q [tokens, heads, d]; k, v [tokens, kv_heads, d]: keys as `rotary_write` returns them, and values.
        """
        fused = self.fused.get("prompt_attention")
        if rows.whole and fused is not None and self.are_own("write_kv", "prefill_attention"):
            return fused(q, k, v, cache, rows, options)
        return self.prefill_attention(q, cache, rows, options)

    @property
    def scores(self) -> bool:
        """Return whether `scored_sample` computes log-probabilities."""
        return "scored_sample" in self.fused and self.are_own("sample")

    def scored_sample(
        self, logits: Tensor, temperature: Tensor, uniform: Tensor, truncation: Truncation, scored: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """`sample`, and log-probabilities of the token and of the likeliest ones, if one kernel finds both.

        scored [rows] int32: how many of each row are found, the token's own included. They are (ids, values), [rows,
        most] int32 and float32.
        """
        if self.scores:
            sampled, *scores = self.fused["scored_sample"](logits, temperature, uniform, truncation, scored)
            return sampled, tuple(scores)
        return self.sample(logits, temperature, uniform, truncation), None
