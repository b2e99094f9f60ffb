"""Faults in the HTTP server: limits, usage, log-probabilities, messages between its processes."""

from . import Fault

LINK, HUB, RESPONSES = "minillm/server/link.py", "minillm/server/hub.py", "minillm/server/responses.py"

FAULTS = (
    Fault(
        "every text is tokenized with special tokens",
        "minillm/server/app.py",
        "engine.tokenizer.encode, text, special)\n        except (InvalidRequest",
        "engine.tokenizer.encode, text, True)\n        except (InvalidRequest",
        "tests/server/test_tokenize.py -k text_of_ids",
    ),
    Fault(
        "any key opens a server that has one",
        "minillm/server/gate.py",
        'kind.lower() == b"bearer" and hmac.compare_digest(found, self.key)',
        'kind.lower() == b"bearer"',
        "tests/server/test_gate.py -k key",
    ),
    Fault(
        "a client's request id may hold a line break",
        "minillm/server/gate.py",
        "REQUEST_ID.fullmatch(given)",
        "given",
        "tests/server/test_gate.py -k request_id",
    ),
    Fault(
        "the first token counts as one between tokens",
        HUB,
        "            if last:\n",
        "            if True:\n",
        "tests/server/test_serving.py -k vllms_names",
    ),
    Fault(
        "the time in the queue begins when a request starts",
        "minillm/server/metrics.py",
        "self.queued.observe(done.scheduled_time - done.arrival_time)",
        "self.queued.observe(0.0)",
        "tests/server/test_serving.py -k vllms_names",
    ),
    Fault(
        "a preempted request starts anew in the metrics",
        "minillm/engine/engine.py",
        "tracked.completion.scheduled_time or time.perf_counter()",
        "time.perf_counter()",
        "tests/engine/test_engine.py -k preempted_request_resumes",
    ),
    Fault(
        "a worker counts the tokens after a stop string",
        LINK,
        "ids = ids[: self.output.add(ids, reason)]",
        "self.output.add(ids, reason)",
        "tests/server/test_stop_strings.py -k tokens_in_one_delta",
    ),
    Fault(
        "of two messages that arrive together one waits",
        LINK,
        "while len(self._held) >= SIZES.size:",
        "if len(self._held) >= SIZES.size:",
        "tests/server/test_link.py -k arrive_whole",
    ),
    Fault(
        "a prompt may fill all the room",
        LINK,
        "if tokens >= limit:",
        "if tokens > limit:",
        "tests/server/test_link.py -k room_for_a_token",
    ),
    Fault(
        "what a worker did not read yet is overtaken by later messages",
        HUB,
        "            if self._unsent:\n                self._unsent += data\n                return\n",
        "",
        "tests/server/test_link.py -k order",
    ),
    Fault(
        "a prompt counts once for each of its choices",
        "minillm/server/app.py",
        "for each in done[:: form.n])",
        "for each in done)",
        "tests/server/test_completions.py -k 'n_choices'",
    ),
    Fault(
        "a stream's usage counts one prompt of several",
        "minillm/server/app.py",
        "prompts[choice.index // form.n] =",
        "prompts[0] =",
        "tests/server/test_completions.py -k usage",
    ),
    Fault(
        "offsets of tokens in the text stay 0",
        RESPONSES,
        "        offset += len(text)\n",
        "",
        "tests/server/test_completions.py -k logprobs",
    ),
    Fault(
        "the unlikeliest tokens are reported",
        RESPONSES,
        "key=lambda item: -item[1]",
        "key=lambda item: item[1]",
        "tests/server/test_chat.py -k logprobs",
    ),
    Fault(
        "a busy server answers 503",
        "minillm/server/protocol.py",
        'status=429, kind="rate_limit_error"',
        'status=503, kind="rate_limit_error"',
        "tests/server/test_limits.py -k full_queue",
    ),
    Fault(
        "a body may nest one level deeper",
        "minillm/server/bounded_json.py",
        "if depth == self._depth:",
        "if depth == self._depth + 1:",
        "tests/server/test_bounded_json.py",
    ),
    Fault(
        "the time to the first token is that to the last",
        "minillm/server/metrics.py",
        "histogram.observe(done.first_token_time - done.arrival_time)",
        "histogram.observe(done.finish_time - done.arrival_time)",
        "tests/server/test_metrics.py",
    ),
    Fault(
        "a stream that fails says nothing of it",
        "minillm/server/event_stream.py",
        "await emit(json.dumps(as_api_error(error).body))",
        "pass",
        "tests/server/test_limits.py -k failing_operation",
    ),
)
