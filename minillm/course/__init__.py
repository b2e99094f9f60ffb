"""For lessons, besides the engine: checkers of exercises, pictures, tiers, predictions, the doctor.

What notebooks import belongs here, and what makes and grades them. What the engine needs does not.

lesson_NN   a lesson's checkers (`checks`), pictures and set-ups; a later lesson may use them
shared      what several lessons use
making      notebooks from their sources, learners' copies
grading     what learners wrote, checked
doctor.py   what this machine can run

from minillm.course import NotSolvedYet, check, compare, tier, yours
"""

from minillm.overrides import NotSolvedYet

from .shared.checks import check
from .shared.figures import describe
from .shared.interpret import triton_here
from .shared.predictions import compare, look_back
from .shared.stubs import solved, yours
from .shared.tiers import Tier, full, tier

__all__ = ["NotSolvedYet", "Tier", "check", "compare", "describe", "full", "look_back", "solved", "tier", "triton_here"]
__all__ += ["yours"]
