"""Faults in tuning launches and in comparing plans."""

from . import Fault

TRIALS, PLANNING, BUILD = "minillm/tuning/trials.py", "minillm/tuning/planning.py", "minillm/tuning/build.py"

FAULTS = (
    Fault(
        "a launch that was fast only once replaces the default",
        TRIALS,
        "if max(found.seconds, times[best]) <",
        "if min(found.seconds, times[best]) <",
        "tests/tuning/test_trials.py",
    ),
    Fault(
        "a launch that writes nothing passes with the previous result",
        TRIALS,
        "result.fill_(math.nan)",
        "pass",
        "tests/tuning/test_trials.py -k writes_nothing",
    ),
    Fault(
        "the warm-up round counts toward a budget's rate",
        PLANNING,
        "statistics.median(times[1:])",
        "statistics.median(times)",
        "tests/tuning/test_trials.py -k warms_up",
    ),
    Fault(
        "a budget that is barely faster replaces the default",
        PLANNING,
        "> (1 + trials.MARGIN) * rates.get(own, math.inf)",
        "> rates.get(own, math.inf)",
        "tests/tuning/test_trials.py -k budget",
    ),
    Fault(
        "a step captured before tuning is neither heard nor timed with other launches",
        PLANNING,
        "    graphs.captured.decodes.pop(shape, None)",
        "    pass",
        "tests/tuning/test_trials.py -k captured_before",
    ),
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
