"""Faults in the engine: seeds, stop strings, locking, lost errors."""

from . import Fault

ENGINE, TEXT, ASYNC = "minillm/engine/engine.py", "minillm/engine/output_text.py", "minillm/engine/async_llm.py"

FAULTS = (
    Fault(
        "a row whose prompt is being computed counts as decoding",
        "minillm/engine/snapshot.py",
        "(self.confirmed == self.prompt) | (self.computed < self.confirmed - 1)",
        "self.computed < self.prompt - 8",
        "tests/server/test_engine_room.py -k in_prefill",
    ),
    Fault(
        "seed 0 is treated as no seed",
        ENGINE,
        "seed=params.seed if params.seed is not None else derived_seed(",
        "seed=params.seed or derived_seed(",
        "tests/engine/test_llm.py -k seed",
    ),
    Fault(
        "a step does not take the lock",
        ENGINE,
        "with self.lock, self._or_reset():",
        "with self._or_reset():",
        "tests/engine/test_llm.py -k lock",
    ),
    Fault(
        "a stop string that spans two tokens is missed",
        TEXT,
        "max(0, before - len(string) + 1)",
        "before",
        "tests/engine/test_output_text.py",
    ),
    Fault(
        "only one character of a partial stop string is held back",
        TEXT,
        "start = max(0, len(text) - len(string) + 1)",
        "start = max(0, len(text) - 1)",
        "tests/engine/test_output_text.py",
    ),
    Fault(
        "a failed step is reported to every stream except the first",
        ASYNC,
        "for each in listening:",
        "for each in listening[1:]:",
        "tests/engine/test_engine.py -k failing_step",
    ),
)
