"""The operations of a forward pass, and the table of their current implementations.  Lessons 02 to 08."""

from .signatures import AttentionOptions, Operations
from .table import OperationSet, names, on, table

__all__ = ["AttentionOptions", "OperationSet", "Operations", "names", "on", "table"]
