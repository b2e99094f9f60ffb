"""Record what an engine does as events, and replay them.  Lessons 09 and 10.

The events belong here, and a replay that checks every claim in them. Measuring does not (`bench`).
"""

from .record import Trace, TraceError
from .replay import StepRows, Tables, replay, tables

__all__ = ["StepRows", "Tables", "Trace", "TraceError", "replay", "tables"]
