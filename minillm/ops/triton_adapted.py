"""The part of adapters in products on a GPU: `add_low_rank`, and the compositions around it.  Lesson 15.

A step of few tokens multiplies them by the weight and by A together, where `AdapterSlots` has put A beneath the weight,
and leaves B to the kernel that reads the product: `Unadded` is such a product. Steps of many tokens, weights that are
quantized or divided between GPUs, and float64 take the operations one after another, except that the gated activation
adds what B gives: for any weight whose rows are all here, but not in float64.
"""

from torch import Tensor, float64

from minillm.kernels import adapted_activation, adapted_norm, low_rank
from minillm.kernels.adapted_rotary import adapted_rotary_write
from minillm.kv_cache.layer_cache import LayerCache
from minillm.quantization import Weight

from . import reference
from .signatures import Adapted, LowRank, Unadded
from .triton_linear import linear


def add_low_rank(out: Tensor, x: Tensor, slots: Tensor, factors: LowRank) -> Tensor:
    if x.dtype == float64:
        return reference.add_low_rank(out, x, slots, factors)
    return low_rank.add_low_rank(out, x, slots, *factors)


def add_adapted(out: Tensor, x: Tensor, adapted: Adapted, factors: LowRank) -> Tensor | None:
    """As `Compositions.add_adapted`: the tokens are grouped once in a step. None for float64."""
    if x.dtype == float64:
        return None
    tiles, just_grouped = _tiles(adapted, factors)
    return low_rank.add_grouped(out, x, tiles, *factors, just_grouped=just_grouped)


def product_with_inner(x: Tensor, weight: Weight, adapted: Adapted) -> Unadded | None:
    """As `Compositions.unadded_linear`; None for many tokens, for float64, and unless A is beneath the weight."""
    both = adapted.beneath.get(id(weight))
    if both is None or len(x) > low_rank.FEW_TOKENS or x.dtype == float64:
        return None
    product, rows = linear(x, both), weight.shape[0]
    return Unadded(product[:, :rows], product[:, rows:], adapted, adapted.factors[id(weight)])


def fits_a_token(product: Unadded) -> bool:
    """Return whether kernels that hold B of a token's rows can add what is still to be added."""
    return _term(product).fits


def added(product: Unadded) -> Tensor:
    """As `Compositions.added`."""
    tiles, just_grouped = _tiles(product.adapted, product.factors)
    return low_rank.add_grouped(product.out, _inner(product), tiles, *product.factors, just_grouped=just_grouped)


def normed(x: Unadded, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `Compositions.normed`, in one launch."""
    return adapted_norm.adapted_add_rms_norm(x.out, residual, norm, eps, _term(x))


def rotary_write(
    x: Unadded, heads: int, cos_sin: Tensor, cache: LayerCache, slots: Tensor, rotate_keys: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    """As `Compositions.rotary_write`, with the product of `heads` heads of queries, keys and values in their place."""
    return adapted_rotary_write(x.out, heads, cos_sin, cache, slots, rotate_keys, keep, _term(x))


def adapted_gate(x: Tensor, weight: Weight, activation: str, adapted: Adapted) -> Tensor | None:
    """As `Compositions.adapted_gate`; None for float64."""
    if x.dtype == float64:
        return None
    factors = adapted.factors[id(weight)]
    # Grouped first: the activation may read the groups while the product still runs.
    tiles, new = _tiles(adapted, factors, adapted_activation.tile_tokens(len(x)))
    product = product_with_inner(x, weight, adapted)
    if product is not None:
        return adapted_activation.adapted_activation(product.out, _inner(product), tiles, factors.up, activation)
    grouped, just_grouped = _tiles(adapted, factors)
    inner = low_rank.inner_products(x, grouped, factors.down, new or just_grouped)
    return adapted_activation.adapted_activation(linear(x, weight), inner, tiles, factors.up, activation)


def _term(product: Unadded) -> low_rank.Term:
    """Return what is still to be added, for kernels that hold B of a token's rows."""
    factors = product.factors
    return low_rank.Term(product.inner, product.adapted.slots, factors.up, len(factors.ends))


def _inner(product: Unadded) -> low_rank.Inner:
    return low_rank.Inner.beneath(product.inner, product.factors.down.shape[1])


def _tiles(adapted: Adapted, factors: LowRank, size: int | None = None) -> tuple[Tensor, bool]:
    """Return the step's tokens, grouped by slot into tiles of `size`, and whether that happens now."""
    size = size or low_rank.sizes_for(len(adapted.slots)).tokens
    known = size in adapted.tiles
    if not known:
        adapted.tiles[size] = low_rank.token_tiles(adapted.slots, len(factors.down), size)
    return adapted.tiles[size], not known
