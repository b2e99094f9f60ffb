"""Faults in measuring launches and plans."""

from . import Fault

TRIALS, PLANNING, BUILD = "minillm/tuning/trials.py", "minillm/tuning/planning.py", "minillm/tuning/build.py"

FAULTS = (
    Fault(
        "a launch that was fast once takes the default's place",
        TRIALS,
        "if max(found.seconds, times[best]) <",
        "if min(found.seconds, times[best]) <",
        "tests/tuning/test_trials.py",
    ),
    Fault(
        "a launch that writes nothing passes with the last one's result",
        TRIALS,
        "result.fill_(math.nan)",
        "pass",
        "tests/tuning/test_trials.py -k writes_nothing",
    ),
    Fault(
        "the round that warms up counts for a budget",
        PLANNING,
        "statistics.median(times[1:])",
        "statistics.median(times)",
        "tests/tuning/test_trials.py -k warms_up",
    ),
    Fault(
        "any budget that is faster by a hair is taken",
        PLANNING,
        "> (1 + trials.MARGIN) * rates.get(own, math.inf)",
        "> rates.get(own, math.inf)",
        "tests/tuning/test_trials.py -k budget",
    ),
    Fault(
        "the run that warms up counts for a plan",
        BUILD,
        "            if round_:\n",
        "            if round_ >= 0:\n",
        "tests/tuning/test_build.py -k compare",
    ),
)
