"""What tests draw at random: the same in every run of `make test`, something else for every seed of `make explore`.

`make explore` sets the two variables. Tests add SEED to the seeds of their own generators, properties and state
machines take their number of examples from `examples`, and all of them bear the mark `explore`.
"""

import os

from hypothesis import settings

GIVEN = os.environ.get("MINILLM_TEST_SEED")
SEED = int(GIVEN or 0)
TIMES = int(os.environ.get("MINILLM_TEST_EXAMPLES") or 1)
PROFILE = "explore" if GIVEN else "fixed"


def examples(count: int) -> settings:
    """Settings of a property that takes `count` examples, and TIMES as many in `make explore`."""
    return settings(max_examples=count * TIMES)
