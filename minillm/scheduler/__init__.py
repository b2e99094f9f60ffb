"""Choose the tokens that run in the next step.  Lesson 10.

Rows, blocks and token budgets belong here, all of them in numpy. Torch, text and the clock do not.
"""

from .scheduler import Scheduler
from .step import Step

__all__ = ["Scheduler", "Step"]
