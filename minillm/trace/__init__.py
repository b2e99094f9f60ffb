"""What an engine did, recorded as events and replayed from them.  Lessons 09 and 10."""

from .record import Trace, TraceError
from .replay import StepRows, Tables, replay, tables

__all__ = ["StepRows", "Tables", "Trace", "TraceError", "replay", "tables"]
