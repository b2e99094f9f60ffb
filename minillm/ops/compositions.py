"""Operations in sequence that a device may run in fewer kernels.  Lessons 07, 08 and 15.

A model calls these where a product reads what a norm or a gated activation has just computed. Each is equivalent to
calling its operations in sequence, including any that `minillm.using` replaced. If the product quantizes its inputs and
all of the operations are the engine's own, the first one writes codes directly, which saves a kernel. Likewise, keys
may be rotated and written to the cache in one kernel, and attention to a new prompt may read them where they were
before that. What adapters add to the products of a step needs its tokens grouped by adapter, which is done once. A
device may implement a composition under the same name. It returns None for weights that its kernels do not support.
"""

from collections.abc import Callable

from torch import Tensor

from minillm.kv_cache.layer_cache import LayerCache
from minillm.overrides import Parts
from minillm.quantization import Weight

from .signatures import Adapted, AttentionOptions, LowRank, Operations, Rows, Truncation, Unadded

COMPOSITIONS = (
    "add_adapted", "product_with_inner", "fits_a_token", "added", "adapted_gate", "normed", "normed_linear",
    "gated_linear", "rotary_write", "prompt_attention", "scored_sample",
)  # fmt: skip


class Compositions(Parts, Operations):
    """Sequences of the current operations. The table lists the operations, not the sequences."""

    fused: dict[str, Callable]  # the functions of the device, by the names of compositions

    def normed(self, x: Tensor | Unadded | None, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and the sum. x=None: the norm of the residual alone, and the residual."""
        if x is None:
            return self.rms_norm(residual, norm, eps), residual
        if isinstance(x, Unadded) and self.are_own("add_rms_norm"):
            return self.fused["normed"](x, residual, norm, eps)
        return self.add_rms_norm(self.added(x), residual, norm, eps)

    def adapted_linear(self, x: Tensor, weight: Weight, adapted: Adapted | None = None) -> Tensor:
        """`linear`, then `add_low_rank` if tokens of the batch have adapters: x [tokens, in] -> [tokens, out]."""
        if adapted is None:
            return self.linear(x, weight)
        product = self._product_with_inner(x, weight, adapted)
        if product is not None:
            return self.added(product)
        return self.add_adapted(self.linear(x, weight), x, adapted, adapted.factors[id(weight)])

    def add_adapted(self, out: Tensor, x: Tensor, adapted: Adapted, factors: LowRank) -> Tensor:
        """`add_low_rank` with what all weights of a step have in common: out [tokens, out], x [tokens, in] -> out."""
        fused = self.fused.get("add_adapted")
        if fused is not None and self.are_own("add_low_rank"):
            result = fused(out, x, adapted, factors)
            if result is not None:
                return result
        return self.add_low_rank(out, x, adapted.slots, factors)

    def unadded_linear(self, x: Tensor, weight: Weight, adapted: Adapted) -> Tensor | Unadded:
        """`adapted_linear`, but `normed`, `rotary_write` or `added`, which reads the result, may do the adding."""
        product = self._product_with_inner(x, weight, adapted)
        if product is None:
            return self.adapted_linear(x, weight, adapted)
        return product if self.fused["fits_a_token"](product) else self.added(product)

    def _product_with_inner(self, x: Tensor, weight: Weight, adapted: Adapted) -> Unadded | None:
        """Return the product with A x from one product of both, where the device has that."""
        fused = self.fused.get("product_with_inner")
        return fused(x, weight, adapted) if fused is not None and self.are_own("linear", "add_low_rank") else None

    def added(self, product: Tensor | Unadded) -> Tensor:
        """Return what `adapted_linear` would have returned, in the memory of the product."""
        return product if isinstance(product, Tensor) else self.fused["added"](product)

    def adapted_gate(self, x: Tensor, weight: Weight, activation: str, adapted: Adapted) -> Tensor:
        """`adapted_linear`, then `gated_activation`: x [tokens, in], weight [2 * out, in] -> [tokens, out]."""
        fused = self.fused.get("adapted_gate")
        if fused is not None and self.are_own("linear", "add_low_rank", "gated_activation"):
            result = fused(x, weight, activation, adapted)
            if result is not None:
                return result
        return self.gated_activation(self.adapted_linear(x, weight, adapted), activation)

    def normed_linear(
        self,
        x: Tensor | Unadded | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: Weight,
        adapted: Adapted | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`normed`, then `adapted_linear`: x, residual [tokens, in], norm [in] -> [tokens, out], and the sum."""
        fused = self.fused.get("normed_linear") if adapted is None else None
        if fused is not None and self.are_own("rms_norm" if x is None else "add_rms_norm", "linear"):
            result = fused(x, residual, norm, eps, weight)
            if result is not None:
                return result
        normed, total = self.normed(x, residual, norm, eps)
        return self.adapted_linear(normed, weight, adapted), total

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
