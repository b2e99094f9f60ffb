"""The operations a forward pass is made of, and what runs for each of them now.  Lessons 02 to 08."""

from .table import NotSolvedYet, OperationSet, Used, names, on, table, using

__all__ = ["NotSolvedYet", "OperationSet", "Used", "names", "on", "table", "using"]
