"""Workers detect stop strings because they produce the text; the engine ends the request soon after."""

import asyncio
import itertools
import json
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

import minillm
from minillm import AsyncLLM, SamplingParams
from minillm.engine.inputs import chat_prompt
from minillm.server import running
from minillm.server.config import ServerConfig
from minillm.server.wire import (
    Abort,
    Deltas,
    EngineFacts,
    Event,
    Failure,
    Hello,
    MessageDecoder,
    Stopped,
    Submit,
    encode,
    numbers_of,
)
from minillm.server.worker.link import EngineError, Prompt, RemoteEngine, _Link
from tests.chance import SEED
from tests.waiting import TIMEOUT, wait_until

LONG = 2048
SAMPLED = {"temperature": 1, "seed": 2, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def long_engine(model_directory, tmp_path_factory):
    """An engine with a context so long that a request that does not stop is noticed."""
    folder = tmp_path_factory.mktemp("models") / "long"
    shutil.copytree(model_directory, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": LONG}
    (folder / "config.json").write_text(json.dumps(config))
    engine = AsyncLLM(folder, load_format="dummy", device="cpu", max_num_seqs=32)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def long_server(long_engine):
    with running(long_engine) as server:
        yield server


@pytest.fixture(scope="module")
def http(long_server):
    with httpx.Client(base_url=long_server.url, timeout=TIMEOUT) as client:
        yield client


@pytest.fixture
def prepared(long_engine, monkeypatch):
    """The requests that the engine is asked to run."""
    seen, prepare = [], long_engine.prepare
    monkeypatch.setattr(long_engine, "prepare", lambda *given, **more: seen.append(prepare(*given, **more)) or seen[-1])
    return seen


def post(http, path="completions", **body):
    answer = http.post(f"/v1/{path}", json=SAMPLED | body)
    assert answer.status_code == 200, answer.text
    return answer


def ask(http, path="completions", **body):
    """(texts, token ids, finish reasons, usage) of a response's choices, after checking that a stream has the same."""
    whole = post(http, path, **body).json()
    kind = "message" if path.startswith("chat") else None
    shown = [_shown(choice, kind) for choice in whole["choices"]]
    lines = post(http, path, **body, stream=True, stream_options={"include_usage": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = [["", [], None] for _ in shown]
    for chunk in chunks:
        for choice in chunk["choices"]:
            text, ids, reason = _shown(choice, kind and "delta")
            entry = streamed[choice["index"]]
            assert entry[2] is None, "the choice had already finished"
            entry[0], entry[1], entry[2] = entry[0] + text, entry[1] + ids, reason
    assert [tuple(entry) for entry in streamed] == shown
    assert chunks[-1]["usage"] == whole["usage"]
    return *map(list, zip(*shown, strict=True)), whole["usage"]


def _shown(choice, kind):
    text = choice["text"] if kind is None else choice[kind].get("content", "")
    return text, choice.get("token_ids", []), choice["finish_reason"]


def alone(engine, prompt, **params):
    """The output of the engine itself, which then checks for stop strings."""
    params = {name: value for name, value in params.items() if name != "return_token_ids"}
    return asyncio.run(engine.generate(prompt, SamplingParams(**params)))


def metric(http, name):
    lines = http.get("/metrics").text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"minillm_{name}")), 0)


def holds_nothing(engine):
    stats = engine.stats()
    return not engine.engine.tracked and stats["blocks_available"] == stats["blocks"]


def middle(text, size=6):
    """A stop string from the middle of a text, with no earlier partial match."""
    place = next(place for place in range(len(text) // 3, len(text)) if text.find(text[place : place + size]) == place)
    return text[place : place + size]


# ---- the engine


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_soon_ends_a_request_whose_stop_string_was_found(
    http, long_server, long_engine, prepared, stream, monkeypatch
):
    body = {"prompt": "The river", "max_tokens": 1500}
    stop = middle(alone(long_engine, "The river", **SAMPLED).text)
    expected = alone(long_engine, "The river", **SAMPLED | {"max_tokens": 1500, "stop": stop})
    count, steps, reported, stopped = len(expected.token_ids), [], threading.Event(), []

    def stop_here(request_id, string):
        stop_there(request_id, string)
        stopped.append((string, long_server.hub.running))
        reported.set()

    def embedding(ids, weight, scale):
        steps.append(len(ids))
        if len(steps) > count + 20:
            assert reported.wait(TIMEOUT), "the engine never learned of the stop string"
        return weight[ids] * scale

    stop_there = long_engine.stop
    monkeypatch.setattr(long_engine, "stop", stop_here)
    names = ("generated_tokens_total", 'finished_total{reason="stop"}', 'finished_total{reason="abort"}')
    before = [metric(http, name) for name in names]
    with minillm.using(embedding=embedding):
        answer = post(http, **body, stop=[stop, "never said"], stream=stream)
        wait_until(lambda: holds_nothing(long_engine))
    pieces = [json.loads(line[6:]) for line in answer.text.splitlines() if "{" in line] if stream else [answer.json()]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected.text
    assert [id for piece in pieces for id in piece["choices"][0]["token_ids"]] == expected.token_ids
    assert stopped == [(stop, 0)], "the stop was reported more than once"
    wait_until(lambda: metric(http, names[1]) > before[1])
    tokens, stops, aborts = (metric(http, name) - b for name, b in zip(names, before, strict=True))
    assert (stops, aborts) == (1, 0)
    assert count <= tokens <= count + 25 < 100, "the server's counter must count all generated tokens"
    one = prepared[-1]
    assert one.tracked.request.params.stop == () and one.tracked.output is None, "the engine decoded text"
    assert one.tracked.completion.text == ""
    assert one.tracked.completion.stop_reason == stop


def test_stopping_a_finished_request_is_harmless(long_engine):
    async def both():
        ended = [delta async for delta in long_engine.stream("Once", SamplingParams(max_tokens=2), request_id="mine")]
        long_engine.stop("mine", "late")
        long_engine.stop("unknown", "late")
        return ended, await long_engine.generate("Once", SamplingParams(max_tokens=2, ignore_eos=True))

    ended, after = asyncio.run(both())
    assert ended[-1].finish_reason in ("length", "stop") and ended[-1].stop_reason != "late"
    assert len(after.token_ids) == 2


def test_a_waiting_request_can_be_stopped(long_engine):
    engine = long_engine.engine
    with engine.lock:
        tracked = engine.prepare([5] * 9, SamplingParams(max_tokens=9), wants_text=False)
        engine.submit(tracked)
        engine.stop(tracked.request.request_id, "x")
    assert (tracked.completion.finish_reason, tracked.completion.stop_reason) == ("stop", "x")
    wait_until(lambda: holds_nothing(long_engine))


# ---- responses


def test_nothing_after_a_stop_string_is_returned_counted_or_streamed(http, long_engine):
    whole = alone(long_engine, "The river", **SAMPLED)
    stop = middle(whole.text)
    (text,), (ids,), reasons, usage = ask(http, prompt="The river", stop=[stop, "never said"])
    assert text == whole.text[: whole.text.index(stop)]
    assert ids == whole.token_ids[: len(ids)] and len(ids) < 60
    assert reasons == ["stop"]
    assert usage["completion_tokens"] == len(ids)
    before_last = long_engine.tokenizer.decode(ids[:-1])
    assert stop in long_engine.tokenizer.decode(ids) and stop not in before_last, (
        "the token that completes the stop string must be the last"
    )


def test_each_choice_of_each_prompt_stops_at_its_own_stop_string(http, long_engine):
    prompts = ["The river", "A stone", "Once"]
    wholes = [alone(long_engine, prompt, **SAMPLED | {"seed": 2 + i}) for prompt in prompts for i in range(3)]
    stop = [middle(wholes[0].text), middle(wholes[5].text), wholes[7].text[:2]]
    expected = [
        alone(long_engine, prompt, **SAMPLED | {"seed": 2 + i, "stop": stop}) for prompt in prompts for i in range(3)
    ]
    texts, ids, reasons, usage = ask(http, prompt=prompts, n=3, stop=stop)
    assert texts == [each.text for each in expected]
    assert ids == [each.token_ids for each in expected]
    assert reasons == [each.finish_reason for each in expected]
    assert len({len(each) for each in ids}) > 2, "the choices should end at different places"
    assert usage["completion_tokens"] == sum(map(len, ids))


def test_logprobs_and_echoes_end_with_the_token_that_completes_the_stop_string(http, long_engine):
    whole = alone(long_engine, "The river", **SAMPLED)
    body = {"prompt": "The river", "stop": middle(whole.text), "logprobs": 2, "echo": True}
    (text,), (ids,), _, _ = ask(http, **body)
    assert text == "The river" + whole.text[: whole.text.index(body["stop"])]
    (choice,) = post(http, **body).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(whole.prompt_token_ids) + len(ids)
    expected = alone(long_engine, "The river", **SAMPLED | {"stop": body["stop"], "logprobs": 2})
    said = choice["logprobs"]["token_logprobs"][len(whole.prompt_token_ids) :]
    logprobs = [entry[token] for entry, token in zip(expected.logprobs, expected.token_ids, strict=True)]
    assert said == pytest.approx(logprobs, abs=1e-3)


def test_chats_stop_at_stop_strings_too(http, long_engine):
    messages = [{"role": "user", "content": "Where is the river?"}]
    prompt = chat_prompt(long_engine.tokenizer, messages)
    stop = middle(alone(long_engine, prompt, **SAMPLED).text)
    expected = alone(long_engine, prompt, **SAMPLED | {"stop": stop})
    texts, ids, reasons, usage = ask(http, "chat/completions", messages=messages, stop=stop, logprobs=True)
    assert (texts, ids, reasons) == ([expected.text], [expected.token_ids], ["stop"])
    assert usage["completion_tokens"] == len(expected.token_ids)


def test_a_stop_string_may_span_several_byte_tokens(http, long_engine):
    tokenizer = long_engine.tokenizer
    wave = [tokenizer.id(f"<0x{byte:02X}>") for byte in "🌊é".encode()]
    bias = {str(wave[0]): 100}  # a run of byte tokens becomes replacement characters when it ends
    end = {"stop_token_ids": [tokenizer.eos_token_id], "max_tokens": 5}
    (text,), (ids,), reasons, _ = ask(http, prompt="The river", logit_bias=bias, stop="\ufffd" * 5, **end)
    assert (text, ids, reasons) == ("", [wave[0]] * 5, ["stop"]), "only the end of the run completes it"
    (text,), (ids,), reasons, _ = ask(http, prompt="The river", logit_bias=bias, stop="\ufffd" * 6, **end)
    assert (text, ids, reasons) == ("\ufffd" * 5, [wave[0]] * 5, ["length"])


@pytest.mark.explore
def test_workers_stop_where_the_engine_would(http, long_engine):
    rng, cases = random.Random(SEED + 4), []
    for seed in range(30):
        body = SAMPLED | {"seed": seed, "max_tokens": rng.choice([5, 20, 40])}
        prompt = rng.choice(["The river", "A stone", "Once"])
        text = alone(long_engine, prompt, **body).text
        places = [rng.randrange(len(text)) for _ in range(rng.choice([1, 1, 3]))]
        body["stop"] = [text[place : place + rng.choice([1, 2, 5, 9])] for place in places]
        body["min_tokens"] = rng.choice([0, 0, rng.randrange(6), rng.randrange(body["max_tokens"])])
        cases.append((prompt, body, alone(long_engine, prompt, **body)))
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda case: ask(http, prompt=case[0], **case[1]), cases))
    for (_, body, expected), (texts, ids, reasons, usage) in zip(cases, answers, strict=True):
        assert (texts, ids, reasons) == ([expected.text], [expected.token_ids], [expected.finish_reason]), body
        assert usage["completion_tokens"] == len(expected.token_ids)
    assert sum(len(expected.token_ids) < body["max_tokens"] for _, body, expected in cases) > 15


# ---- the socket


class Link:
    """A worker's end of the link; the test plays the engine."""

    def __init__(self, engine):
        self.sent, self.decoder = [], MessageDecoder()
        self.remote = RemoteEngine()
        self.link = _Link(self.remote)
        self.link.connection_made(SimpleNamespace(write=self._write, close=lambda: None))
        facts = EngineFacts("m", True, 1, 1, 1, "float32", 1, 1, ServerConfig())
        self.send(Hello(facts, str(engine.engine.tokenizer_directory)))

    def _write(self, data):
        self.sent += self.decoder.feed(data)

    def send(self, message):
        self.link.data_received(encode(message))

    async def begin(self, params, n=1):
        """A stream of n choices whose client does not read yet."""
        stream = self.remote.stream([Prompt([5])], params, n)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        return first, stream

    def take(self, kind):
        """Take the worker's messages of one kind."""
        found = [message for message in self.sent if isinstance(message, kind)]
        self.sent = [message for message in self.sent if not isinstance(message, kind)]
        return found


@pytest.fixture
def linked(long_engine):
    def run(work):
        async def inside():
            return await asyncio.wait_for(work(Link(long_engine)), TIMEOUT)

        return asyncio.run(inside())

    return run


def tokens(engine, text):
    return engine.tokenizer.encode(text, add_special_tokens=False)


def deltas(*events, plain=()):
    return Deltas(list(events), numbers_of(plain))


def test_the_worker_reports_a_stop_string_at_once_and_ignores_later_tokens(linked, long_engine):
    ids = tokens(long_engine, "one two three four")
    others = tokens(long_engine, "one more and three")

    async def work(link):
        first, stream = await link.begin(SamplingParams(stop="two", temperature=1, seed=1), n=2)
        (submitted,) = link.take(Submit)
        assert (submitted.params, submitted.n) == ({"seed": 1}, 2), "stop strings must stay in the worker"
        for pair in itertools.zip_longest(ids, others):
            found = [(key, token) for key, token in enumerate(pair) if token is not None]
            link.send(deltas(plain=itertools.chain(*found)))
        assert link.take(Stopped) == [Stopped(0, "two")], "the report must not wait for the client to read"
        link.send(deltas(Event(0, [ids[0]])))
        link.send(deltas(Event(0, [], failure=Failure("failed", "it broke"))))
        link.send(deltas(Event(0, [], reason="stop", stop="two")))
        link.send(deltas(Event(1, [], reason="length")))
        found = {0: [], 1: []}
        items = [await first] + [item async for item in stream]
        for choice, delta in items:
            found[choice.index].append(delta)
        assert not link.sent, "no abort and no second report"
        return found

    found = linked(work)
    stopped, whole = found[0][-1].completion, found[1][-1].completion
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("one ", "stop", "two")
    assert "".join(delta.text for delta in found[0]) == stopped.text
    assert stopped.token_ids == ids[: len(stopped.token_ids)] != ids
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("one more and three", others, "length")


def test_an_engine_failure_matters_only_before_the_stop_string(linked, long_engine):
    ids = tokens(long_engine, "one two three four")

    async def work(link):
        first, stream = await link.begin(SamplingParams(stop="three"))
        for token in ids:
            link.send(deltas(plain=[0, token]))
        link.send(deltas(Event(0, [], failure=Failure("failed", "it broke"))))
        link.link.connection_lost(None)
        items = [await first] + [item async for item in stream]
        assert items[-1][1].completion.text == "one two "

    linked(work)

    async def fails(link):
        first, stream = await link.begin(SamplingParams(stop="three"))
        link.send(deltas(plain=[0, ids[0]]))
        link.send(deltas(Event(0, [], failure=Failure("failed", "it broke"))))
        await first
        with pytest.raises(EngineError, match="it broke"):
            await anext(stream)

    linked(fails)


@pytest.mark.parametrize("reason", [None, "length"])
def test_tokens_in_one_delta_are_truncated_with_their_logprobs(linked, long_engine, reason):
    ids = tokens(long_engine, "one two three four")
    entries = [{str(token): -float(i)} for i, token in enumerate(ids)]

    async def work(link):
        first, stream = await link.begin(SamplingParams(stop="two", logprobs=0))
        link.send(deltas(Event(0, ids, logprobs=entries, reason=reason)))
        stopped = link.take(Stopped)
        assert len(stopped) == (reason is None), "a finished request needs no report to the engine"
        _, delta = await first
        assert [item async for item in stream] == []
        return delta

    delta = linked(work)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("one ", "stop", "two")
    kept = len(delta.token_ids)
    assert delta.token_ids == delta.completion.token_ids == ids[:kept] != ids
    assert delta.logprobs == delta.completion.logprobs == [{token: -float(i)} for i, token in enumerate(ids[:kept])]
    assert long_engine.tokenizer.decode(ids[:kept]).endswith("two")


def test_a_failing_tokenizer_ends_only_its_own_request(linked, long_engine, monkeypatch):
    ids = tokens(long_engine, "one two")

    async def work(link):
        failing, stream = await link.begin(SamplingParams(stop="x"))
        other, _ = await link.begin(SamplingParams())

        def broken(ids, reason=None):
            raise ValueError("no text")

        monkeypatch.setattr(link.remote._choices[0][0].output, "add", broken)
        link.send(deltas(plain=[0, ids[0], 1, ids[0]]))
        with pytest.raises(ValueError, match="no text"):
            await failing
        assert link.take(Abort) == [Abort([0])]
        assert (await other)[1].token_ids == ids[:1]

    linked(work)
