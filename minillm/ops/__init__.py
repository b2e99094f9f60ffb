"""The operations a forward pass is made of, and what runs for each of them now.  Lessons 02 to 08."""

from .signatures import AttentionOptions, Operations
from .table import OperationSet, names, on, table

__all__ = ["AttentionOptions", "OperationSet", "Operations", "names", "on", "table"]
