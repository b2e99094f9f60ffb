"""Which tokens run in the next step.  Lesson 10."""

from .scheduler import Scheduler
from .step import Step

__all__ = ["Scheduler", "Step"]
