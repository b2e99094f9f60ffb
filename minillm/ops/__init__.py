"""The operations of a forward pass, and the table of their current implementations.  Lessons 02 to 08.

The specification of each operation belongs here, and the table of what computes it on each device. Kernels do not: they
are in `kernels/`, and import nothing from minillm.
"""

from .signatures import AttentionOptions, Operations, Rows
from .table import OperationSet, names, on, table

__all__ = ["AttentionOptions", "OperationSet", "Operations", "Rows", "names", "on", "table"]
