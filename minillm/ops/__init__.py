"""The operations a forward pass is made of, and what runs for each of them now.  Lessons 02 to 08."""

from .table import OperationSet, names, on, table

__all__ = ["OperationSet", "names", "on", "table"]
