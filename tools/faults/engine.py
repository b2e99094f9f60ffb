"""Faults in the engine's loop: seeds, stop strings, locks, errors that get lost."""

from . import Fault

ENGINE, TEXT, ASYNC = "minillm/engine/engine.py", "minillm/engine/output_text.py", "minillm/engine/async_llm.py"

FAULTS = (
    Fault(
        "a request's own seed is ignored",
        ENGINE,
        "seed=params.seed if params.seed is not None else derived_seed(",
        "seed=derived_seed(",
        "tests/engine/test_llm.py -k seed",
    ),
    Fault(
        "seed 0 counts as none",
        ENGINE,
        "seed=params.seed if params.seed is not None else derived_seed(",
        "seed=params.seed or derived_seed(",
        "tests/engine/test_llm.py -k seed",
    ),
    Fault(
        "a step takes no lock",
        ENGINE,
        "with self.lock, self._or_reset():",
        "with self._or_reset():",
        "tests/engine/test_llm.py -k lock",
    ),
    Fault(
        "what a failed step launched stays in flight",
        ENGINE,
        "            self.in_flight.clear()\n            requests = ",
        "            requests = ",
        "tests/engine/test_listeners.py",
    ),
    Fault(
        "a generation does not end what it began when it fails",
        "minillm/engine/llm.py",
        "                engine.abort(tracked)",
        "                pass",
        "tests/engine/test_llm.py -k generation_has_submitted",
    ),
    Fault(
        "a chat begins with two beginning-of-text tokens",
        "minillm/engine/llm.py",
        "tokenizer.apply_chat_template(list(conversation)), add_special_tokens=False)",
        "tokenizer.apply_chat_template(list(conversation)))",
        "tests/engine/test_llm.py -k one_bos_token",
    ),
    Fault(
        "a stop string across two tokens is missed",
        TEXT,
        "start = max(0, len(self.text) - self._longest + 1)",
        "start = len(self.text)",
        "tests/engine/test_output_text.py",
    ),
    Fault(
        "of a beginning stop string one character is held back",
        TEXT,
        "start = max(0, len(text) - len(string) + 1)",
        "start = max(0, len(text) - 1)",
        "tests/engine/test_output_text.py",
    ),
    Fault(
        "the end token is part of the text",
        TEXT,
        'self._detokenizer.add(ids[:-1] if reason == "stop" else ids)',
        "self._detokenizer.add(ids)",
        "tests/engine/test_output_text.py tests/engine/test_engine.py -k 'output_text or stop_token_ends'",
    ),
    Fault(
        "min_tokens keeps a stop string waiting for one token more",
        TEXT,
        "self._tokens < self._min_tokens",
        "self._tokens <= self._min_tokens",
        "tests/engine/test_output_text.py",
    ),
    Fault(
        "who leaves a stream leaves its request running",
        ASYNC,
        "            if not finished:\n                self.abort(prepared)",
        "            if finished:\n                self.abort(prepared)",
        "tests/engine/test_async_llm.py -k leaving_a_stream",
    ),
    Fault(
        "a failed step reaches every stream except the first",
        ASYNC,
        "for each in listening:",
        "for each in listening[1:]:",
        "tests/engine/test_engine.py -k failing_step",
    ),
)
