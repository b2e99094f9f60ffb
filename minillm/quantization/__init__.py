"""Typed weights: one file per storage format, one `linear` for all of them.  Lessons 05 to 07."""

from .dense import DenseWeight
from .int8 import Int8Weight
from .recipe import Recipe
from .weight import Weight

__all__ = ["DenseWeight", "Int8Weight", "Recipe", "Weight"]
