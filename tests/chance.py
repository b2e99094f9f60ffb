"""Seeds of randomized tests: fixed in `make test`, different in every run of `make explore`.

`make explore` sets the two variables. Tests add SEED to the seeds of their own generators; properties and state
machines take their number of examples from `examples`. All randomized tests have the marker `explore`.
"""

import os

from hypothesis import settings

GIVEN = os.environ.get("MINILLM_TEST_SEED")
SEED = int(GIVEN or 0)
TIMES = int(os.environ.get("MINILLM_TEST_EXAMPLES") or 1)
PROFILE = "explore" if GIVEN else "fixed"


def examples(count: int) -> settings:
    """Hypothesis settings with `count` examples, or TIMES as many in `make explore`."""
    return settings(max_examples=count * TIMES)
