"""Faults in tuning launches and in comparing plans."""

from . import Fault

PLANNING, BUILD = "minillm/tuning/planning.py", "minillm/tuning/build.py"

FAULTS = (
    Fault(
        "prefill is tuned with a launch that its steps do not look up",
        PLANNING,
        "            if problem in heard:",
        "            if heard:",
        "tests/tuning/test_trials.py -k whole_prompts",
    ),
    Fault(
        "the warm-up run counts in the comparison of plans",
        BUILD,
        "            if round_:\n",
        "            if round_ >= 0:\n",
        "tests/tuning/test_build.py -k compare",
    ),
)
