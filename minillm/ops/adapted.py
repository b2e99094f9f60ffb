"""The compositions that add what adapters change to products.  Lesson 15.

They need a step's tokens grouped by adapter, which a device does once for all weights. A device may also compute A x
along with W x, and leave what B adds to the kernel that reads the product: `Unadded` is such a product.
"""

from collections.abc import Callable

from torch import Tensor

from minillm.overrides import Parts
from minillm.quantization import Weight

from .signatures import Adapted, LowRank, Operations, Unadded


class AdaptedCompositions(Parts, Operations):
    """Products of tokens some of which have adapters. `Compositions` has all others."""

    fused: dict[str, Callable]  # the functions of the device, by the names of compositions

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

    def unadded_linear(self, x: Tensor, weight: Weight, adapted: Adapted | None = None) -> Tensor | Unadded:
        """`adapted_linear`, but `normed`, `rotary_write` or `added`, which reads the result, may do the adding."""
        product = None if adapted is None else self._product_with_inner(x, weight, adapted)
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
