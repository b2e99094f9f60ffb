"""Faults in what the server counts and limits: queues, waits, deadlines, clients, metrics, replaced processes."""

from . import Fault

LINK, ADMISSION = "minillm/server/worker/link.py", "minillm/server/engine_side/admission.py"
LINE, WAITING = "minillm/server/engine_side/line.py", "minillm/server/engine_side/waiting.py"

FAULTS = (
    Fault(
        "a client names itself in front of what the proxy says",
        "minillm/server/worker/gate.py",
        'b",".join(values).rpartition(b",")[2]',
        'b",".join(values).partition(b",")[0]',
        "tests/server/test_clients.py -k last_one",
    ),
    Fault(
        "choices whose grammar is being compiled are not their client's",
        LINE,
        "return self._clients[client] + sum(each == client for each in self.compiling.values())",
        "return self._clients[client]",
        "tests/server/test_response_format.py -k worker_that_has_died",
    ),
    Fault(
        "long texts are tokenized on the event loop",
        "minillm/server/worker/app.py",
        "await _run(in_thread, engine.tokenizer.encode, text, special)",
        "await _run(False, engine.tokenizer.encode, text, special)",
        "tests/server/test_limits.py -k tokenizes_long_texts",
    ),
    Fault(
        "an engine that stays in one step is left alone",
        "minillm/server/supervisor/supervisor.py",
        'case "beat" if message["working"] > self.hang_timeout:',
        'case "never":',
        "tests/server/test_supervisor.py -k long_in_one_step",
    ),
    Fault(
        "answers that run say nothing about how long answers become",
        WAITING,
        "self._lengths(ends, tokens[runs & (certain == 0)], now, per_token)",
        "self._lengths(ends, tokens[:0], now, per_token)",
        "tests/server/test_waiting.py -k 'known_once_answers and 256'",
    ),
    Fault(
        "answers whose shorter peers were not watched make all look long",
        WAITING,
        "np.maximum(tokens - (at - self._since) / max(per_token, 1e-9), 0)",
        "np.zeros_like(tokens)",
        "tests/server/test_waiting.py -k 'known_once_answers and exponential'",
    ),
    Fault(
        "what a worker stops at a string is taken to reach its limit",
        LINK,
        "[each.form for each in prompts], bool(params.stop)",
        "[each.form for each in prompts], False",
        "tests/server/test_waiting.py -k 'how_it_ended or stand_still'",
    ),
    Fault(
        "the steps of the engine are a gauge",
        "minillm/server/engine_side/metrics.py",
        'EVENTS = ("steps", ',
        "EVENTS = (",
        "tests/server/test_metrics.py -k only_rises",
    ),
    Fault(
        "one worker may take the whole of a burst",
        "minillm/server/shares.py",
        "return any(GONE < other < own for other in self._open)",
        "return False",
        "tests/server/test_shares.py",
    ),
    Fault(
        "a busy server answers 503",
        "minillm/server/worker/protocol.py",
        'status=429, kind="rate_limit_error"',
        'status=503, kind="rate_limit_error"',
        "tests/server/test_limits.py -k full_queue",
    ),
    Fault(
        "the time to the first token is that to the last",
        "minillm/server/engine_side/metrics.py",
        "histogram.observe(done.first_token_time - done.arrival_time)",
        "histogram.observe(done.finish_time - done.arrival_time)",
        "tests/server/test_metrics.py",
    ),
    Fault(
        "the first token's deadline ends a request that has one",
        LINK,
        '"had no token", none_begun)',
        '"had no token", lambda: True)',
        "tests/server/test_deadlines.py -k first_tokens",
    ),
    Fault(
        "each worker has a limit of its own for a client",
        ADMISSION,
        "running = sum(line.of(client) for line in self._lines)",
        "running = min(line.of(client) for line in self._lines)",
        "tests/server/test_clients.py -k in_all_workers",
    ),
)
