"""Faults in the engine: seeds, stop strings, locking, lost errors."""

from . import Fault

ENGINE, TEXT, ASYNC = "minillm/engine/engine.py", "minillm/engine/output_text.py", "minillm/engine/async_llm.py"

FAULTS = (
    Fault(
        "a snapshot forgets the blocks of requests that have just ended",
        "minillm/engine/snapshot.py",
        "        owner[self.leaving] = _AFTER_ROWS + LEAVING\n",
        "",
        "tests/server/test_engine_room.py -k leaving",
    ),
    Fault(
        "a row whose prompt is being computed counts as decoding",
        "minillm/engine/snapshot.py",
        "(self.confirmed == self.prompt) | (self.computed < self.confirmed - 1)",
        "self.computed < self.prompt - 8",
        "tests/server/test_engine_room.py -k in_prefill",
    ),
    Fault(
        "quantization=auto leaves the head as it is",
        "minillm/engine/precision.py",
        "config.quantized_head or chosen.quantized_head",
        "config.quantized_head",
        "tests/engine/test_precision.py",
    ),
    Fault(
        "quantization=auto quantizes a checkpoint that is quantized already",
        "minillm/engine/precision.py",
        "if isinstance(place, Path) and read_layout(place) is not None:",
        "if False:",
        "tests/engine/test_precision.py -k checkpoint",
    ),
    Fault(
        "minillm build forgets the precision that was chosen",
        "minillm/tuning/build.py",
        "    config = precision.resolved(config, place, device, traffic)\n",
        "",
        "tests/tuning/test_build.py -k precision",
    ),
    Fault(
        "a request's own seed is ignored",
        ENGINE,
        "seed=params.seed if params.seed is not None else derived_seed(",
        "seed=derived_seed(",
        "tests/engine/test_llm.py -k seed",
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
        "steps in flight survive a failed step",
        ENGINE,
        "            self.in_flight.clear()\n            requests = ",
        "            requests = ",
        "tests/engine/test_listeners.py",
    ),
    Fault(
        "a failed generation does not abort its requests",
        "minillm/engine/llm.py",
        "                engine.abort(tracked)",
        "                pass",
        "tests/engine/test_llm.py -k generation_has_submitted",
    ),
    Fault(
        "a chat starts with two beginning-of-text tokens",
        "minillm/engine/llm.py",
        "tokenizer.encode(rendered, add_special_tokens=False)",
        "tokenizer.encode(rendered)",
        "tests/engine/test_llm.py -k one_bos_token",
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
        "the end token is part of the text",
        TEXT,
        'self._detokenizer.add(ids[:-1] if reason == "stop" else ids)',
        "self._detokenizer.add(ids)",
        "tests/engine/test_output_text.py tests/engine/test_engine.py -k 'output_text or stop_token_ends'",
    ),
    Fault(
        "a stop string counts one token before min_tokens are there",
        TEXT,
        "self._tokens > self._min_tokens",
        "self._tokens >= self._min_tokens",
        "tests/engine/test_output_text.py",
    ),
    Fault(
        "closing a stream leaves its request running",
        ASYNC,
        "            if not finished:\n                self.abort(prepared)",
        "            if finished:\n                self.abort(prepared)",
        "tests/engine/test_async_llm.py -k leaving_a_stream",
    ),
    Fault(
        "a failed step is reported to every stream except the first",
        ASYNC,
        "for each in listening:",
        "for each in listening[1:]:",
        "tests/engine/test_engine.py -k failing_step",
    ),
    Fault(
        "an engine that no longer serves still limits prompts",
        ASYNC,
        "_configure(self.engine, unlimited)",
        "pass",
        "tests/test_config.py -k streams_wait",
    ),
)
