"""Faults in structured output: masks, schemas, the tokens of required texts."""

from . import Fault

MATCHER = "minillm/grammar/matcher.py"

FAULTS = (
    Fault(
        "requests with the same grammar share one place in it",
        MATCHER,
        "return Matcher(self._state.deep_copy(), self.mask)",
        "return self",
        "tests/grammar/test_matcher.py -k advance_alone",
    ),
)
