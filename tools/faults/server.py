"""Faults in the HTTP server: HTTP, usage, log-probabilities, messages between its processes."""

from . import Fault

LINK, RESPONSES = "minillm/server/worker/link.py", "minillm/server/worker/responses.py"
LINE = "minillm/server/engine_side/line.py"

FAULTS = (
    Fault(
        "schemas refer to places that many tools do not resolve",
        "minillm/server/worker/description.py",
        'ref_template=PLACE + "{model}"',
        'ref_template="#/$defs/{model}"',
        "tests/server/test_description.py -k reference",
    ),
    Fault(
        "the Host header counts, whatever host the target names",
        "minillm/server/worker/http1.py",
        'headers=[(b"Host", host), *others]',
        "headers=request.headers.raw_items()",
        "tests/server/test_http1.py -k target_counts",
    ),
    Fault(
        "a path says which methods its first route has",
        "minillm/server/worker/methods.py",
        "first is not None and route.path == first.path",
        "route is first",
        "tests/server/test_http1.py -k which_methods",
    ),
    Fault(
        "a refusal numbers prompts from 1",
        "minillm/errors.py",
        "{what} {place}: {error}",
        "{what} {place + 1}: {error}",
        "tests/engine/test_wrong_inputs.py -k several",
    ),
    Fault(
        "a stream's text is put into JSON as it is",
        "minillm/server/worker/responses.py",
        """f'{{"index":{index},"text":{quoted(gained.text)},""",
        """f'{{"index":{index},"text":"{gained.text}",""",
        "tests/server/test_event_stream.py -k written_as_text",
    ),
    Fault(
        "the engine room's numbers need no key",
        "minillm/server/worker/gate.py",
        "*FILES)\n",
        '*FILES, "/engine/state")\n',
        "tests/server/test_engine_room.py -k needs_the_key",
    ),
    Fault(
        "an error under /v2 has OpenAI's form",
        "minillm/server/worker/gate.py",
        "form = error.bare if",
        "form = error.body if",
        "tests/server/test_kserve.py -k refused",
    ),
    Fault(
        "an output's own choice of the binary form is ignored",
        "minillm/server/worker/kserve.py",
        "return bool((each.parameters or {}).get(BINARY, every))",
        "return every",
        "tests/server/test_kserve.py -k binary",
    ),
    Fault(
        "every text is tokenized with special tokens",
        "minillm/server/worker/app.py",
        "engine.tokenizer.encode, text, special)\n        except (InvalidRequest",
        "engine.tokenizer.encode, text, True)\n        except (InvalidRequest",
        "tests/server/test_tokenize.py -k text_of_ids",
    ),
    Fault(
        "any key opens a server that has one",
        "minillm/server/worker/gate.py",
        "hmac.compare_digest(hashlib.sha256(each).hexdigest(), self.key) for each in given",
        "True for each in given",
        "tests/server/test_gate.py -k key",
    ),
    Fault(
        "a client's request id may hold a line break",
        "minillm/server/worker/gate.py",
        "REQUEST_ID.fullmatch(given)",
        "given",
        "tests/server/test_gate.py -k request_id",
    ),
    Fault(
        "the time in the queue begins when a request starts",
        "minillm/server/engine_side/metrics.py",
        "self.queued.observe(done.scheduled_time - done.arrival_time)",
        "self.queued.observe(0.0)",
        "tests/server/test_serving.py -k vllms_names",
    ),
    Fault(
        "a worker counts the tokens after a stop string",
        "minillm/server/worker/choice.py",
        "ids = ids[: self.output.add(ids, reason)]",
        "self.output.add(ids, reason)",
        "tests/server/test_stop_strings.py -k tokens_in_one_delta",
    ),
    Fault(
        "of two messages that arrive together one waits",
        "minillm/server/wire.py",
        "while len(self._held) >= HEADER.size:",
        "if len(self._held) >= HEADER.size:",
        "tests/server/test_link.py -k arrive_whole",
    ),
    Fault(
        "a stream's usage counts one prompt of several",
        "minillm/server/worker/app.py",
        "prompts[choice.index // form.n] =",
        "prompts[0] =",
        "tests/server/test_completions.py -k usage",
    ),
    Fault(
        "a body may nest one level deeper",
        "minillm/server/worker/bounded_json.py",
        "if depth == self._depth:",
        "if depth == self._depth + 1:",
        "tests/server/test_bounded_json.py",
    ),
    Fault(
        "messages that are not read fill the memory",
        "minillm/server/logs.py",
        "queue.Queue(HELD)",
        "queue.Queue()",
        "tests/server/test_logs.py -k holds_no_one",
    ),
    Fault(
        "a half-closed client loses its answer",
        "minillm/server/worker/connections.py",
        "        self._probe(limits.FIRST_PROBE)\n        return True\n",
        "        return False\n",
        "tests/server/test_connections.py -k half_closed",
    ),
    Fault(
        "a chunk written as text lacks the token ids",
        "minillm/server/worker/responses.py",
        '"logprobs":null,"finish_reason":null{ids}}}\'\n\n    def generated(self, tokens: int) -> int:\n        """',
        '"logprobs":null,"finish_reason":null}}\'\n\n    def generated(self, tokens: int) -> int:\n        """',
        "tests/server/test_event_stream.py -k written_as_text",
    ),
    Fault(
        "a prompt without numbers fails the other prompts of its request",
        "minillm/server/worker/link.py",
        "if failed == len(mine) or not partly:",
        "if failed:",
        "tests/server/test_not_numbers.py -k other_prompts",
    ),
)
