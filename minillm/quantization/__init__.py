"""Typed weights: one file per storage format, one `linear` for all of them.  Lessons 05 to 07.

How codes and scales are stored, filled, and turned back into numbers belongs here. How they are chosen (`calibration`)
and multiplied (`ops`) does not.
"""

from .activations import Activations, QuantizedActivations
from .dense import Dense, DenseWeight
from .fp4 import Fp4, Fp4Weight, Mxfp4, Nvfp4
from .fp8 import Fp8, Fp8Weight
from .int4 import Int4, Int4Weight
from .int8 import Int8, Int8Weight
from .quantized import QuantizedWeight
from .recipe import Recipe, weight_only
from .sparse import Pruned, Sparse, Sparse24, SparseWeight
from .weight import Codes, Format, Shard, Weight

__all__ = [
    "Activations",
    "Codes",
    "Dense",
    "DenseWeight",
    "Format",
    "Fp4",
    "Fp4Weight",
    "Fp8",
    "Fp8Weight",
    "Int4",
    "Int4Weight",
    "Int8",
    "Int8Weight",
    "Mxfp4",
    "Nvfp4",
    "Pruned",
    "QuantizedActivations",
    "QuantizedWeight",
    "Recipe",
    "Shard",
    "Sparse",
    "Sparse24",
    "SparseWeight",
    "Weight",
    "weight_only",
]
