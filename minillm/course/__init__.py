"""What lessons use besides the engine: checkers of exercises, tiers, predictions, the doctor, the builder.

What notebooks import belongs here, and what builds, checks and grades them. What the engine needs does not.

from minillm.course import NotSolvedYet, check, compare, tier, yours
"""

from minillm.overrides import NotSolvedYet

from .checks import check
from .figures import describe
from .interpret import triton_here
from .predictions import compare, look_back
from .stubs import solved, yours
from .tiers import Tier, full, tier

__all__ = ["NotSolvedYet", "Tier", "check", "compare", "describe", "full", "look_back", "solved", "tier", "triton_here"]
__all__ += ["yours"]
