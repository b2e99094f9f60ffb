"""The page at / and the engine's state that it shows: true, bounded, copied seldom, closed to those without a key."""

import json
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the server needs fastapi, which is not installed here")

import minillm
from minillm.engine import Engine, snapshot
from minillm.engine.recent import Recent
from minillm.engine.snapshot import CACHED, FREE, LEAVING, SHARED, Snapshot
from minillm.kv_cache import BlockPool
from minillm.request import Request, SamplingParams
from minillm.scheduler.scheduler import Scheduler
from minillm.server import running
from minillm.server.engine_room import state as room
from minillm.server.engine_room.page import FILES, HERE
from minillm.server.engine_room.state import EngineRoom
from minillm.server.engine_side.metrics import Metrics
from tests.proofs import only_in_proofs
from tests.waiting import TIMEOUT, wait_until

PROMPT = "The harbor of the island has a lighthouse, and the keeper of the lighthouse has a boat."
LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        yield client


def engine_of(**options):
    return Engine(device="cpu", **({"num_blocks": 48, "max_num_seqs": 4, "max_model_len": 256} | options))


class ByHand:
    """An engine whose snapshots the test hands out."""

    def __init__(self, engine):
        self.config, self.engine, self.asked = engine.config, engine, []

    def snapshot(self, cells, listed):
        self.asked.append(Future())
        return self.asked[-1]


def described(engine, cells=room.CELLS, listed=room.LISTED):
    """The state of an engine that the test steps itself."""
    source = ByHand(engine)
    return EngineRoom(source, Metrics("m"), lambda task: None).describe(Snapshot.of(engine, cells, listed))


# ---- the page


def test_the_page_and_its_files_have_their_types_and_a_policy_that_loads_nothing_else(http):
    for path, (name, kind) in FILES.items():
        answer = http.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"] == kind
        assert answer.content == (HERE / name).read_bytes()
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';") and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_names_only_files_that_the_server_has():
    page = (HERE / "index.html").read_text(encoding="utf-8")
    named = set(re.findall(r'(?:src|href)="([^"]+)"', page))
    assert named == {path[1:] for path in FILES if path not in ("/", "/engine/drawing.js")} | {"metrics"}
    for path in HERE.glob("*.*"):
        if path.suffix in (".html", ".css", ".js", ".svg"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), f"{path.name} names another host"
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", text), path.name
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=", page), "the policy forbids inline code"


def test_every_element_that_the_script_asks_for_is_in_the_page():
    page, script = ((HERE / name).read_text(encoding="utf-8") for name in ("index.html", "script.js"))
    there = set(re.findall(r'\bid="([^"]+)"', page))
    asked = set(re.findall(r'(?:\$|put)\("([^"]+)"', script))
    assert len(asked) > 25 and asked <= there
    labeled = set(re.findall(r'<label for="([^"]+)"', page))
    assert set(re.findall(r'<(?:input|select|textarea) id="([^"]+)"', page)) == labeled


# ---- the state of an engine


def test_rows_and_blocks_of_requests_that_share_a_prefix():
    engine = engine_of(run_ahead=0)
    for _ in range(6):
        engine.submit(engine.prepare(PROMPT, LONG))
    for _ in range(3):
        engine.step()
    state = described(engine)
    engine.scheduler.check()
    blocks, prompt = state["blocks"], len(engine.tokenizer.encode(PROMPT))
    assert (state["running"], state["waiting"], state["max_running"]) == (4, 2, 4)
    shared = prompt // 16
    assert shared >= 1 and blocks["cells"].count(SHARED) == shared
    for row in state["rows"]:
        assert (row["phase"], row["prompt"], row["limit"]) == ("decode", prompt, prompt + 40)
        assert (row["tokens"], row["computed"]) == (prompt + 3, prompt + 2)
        assert row["blocks"] == -(-row["computed"] // 16) == shared + blocks["cells"].count(row["row"])
    assert len({row["row"] for row in state["rows"]}) == len({row["id"] for row in state["rows"]}) == 4
    assert blocks["used"] == shared + 4 * (state["rows"][0]["blocks"] - shared)
    assert (state["totals"]["steps"], state["totals"]["generated_tokens"]) == (3, 12)
    assert state["totals"]["computed_tokens"] == 4 * (prompt + 2) - 3 * 16 * shared
    assert state["totals"]["prefix_hit_tokens"] == 3 * 16 * shared
    engine.close()


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_drafts_are_shown_if_the_engine_makes_any(speculate):
    engine = engine_of(speculate=speculate)
    engine.submit(engine.prepare(PROMPT * 2, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    totals, stats = described(engine)["totals"], engine.stats()
    names = [name for name in ("drafts", "draft_tokens", "accepted_tokens") if name in totals]
    assert len(names) == (3 if speculate == "ngram" else 0) and all(totals[name] == stats[name] for name in names)
    script, page = ((HERE / FILES[path][0]).read_text(encoding="utf-8") for path in ("/engine/script.js", "/"))
    assert all(f"totals.{name}" in script for name in names) and 'id="drafts" hidden' in page
    engine.close()


@pytest.mark.parametrize("run_ahead, cells", [(0, room.CELLS), (1, 7), *only_in_proofs((0, 7), (1, room.CELLS))])
def test_the_cells_add_up_to_the_pool_at_every_step(run_ahead, cells):
    """Requests come, go, share blocks, are preempted and aborted; every block is in one state all the time."""
    engine = engine_of(num_blocks=11, run_ahead=run_ahead, max_num_batched_tokens=16)
    for index in range(7):
        engine.submit(engine.prepare(PROMPT[index % 2 :], SamplingParams(max_tokens=20 + 9 * index, ignore_eos=True)))
    seen, sizes, phases = set(), set(), set()
    while engine.has_work:
        engine.step()
        if engine.stats()["steps"] == 30:
            engine.abort("request-4")
        blocks = described(engine, cells)["blocks"]
        assert blocks["used"] + blocks["cached"] + blocks["free"] == blocks["total"] == 11
        per_cell, more = blocks["per_cell"], blocks["more"]
        assert len(blocks["cells"]) == -(-(11 - sum(more.values())) // per_cell) <= cells
        used = [cell not in (FREE, CACHED) for cell in blocks["cells"]]
        filled = blocks["filled"] or [int(each) for each in used]
        assert sum(filled) == blocks["used"] and [count > 0 for count in filled] == used
        if per_cell == 1:
            counts = [blocks["cells"].count(state) for state in (CACHED, FREE)]
            assert counts == [blocks["cached"] - more["cached"], blocks["free"] - more["free"]]
        rows = described(engine, cells)["rows"]
        assert {cell for cell in blocks["cells"] if cell >= 0} <= {row["row"] for row in rows}
        assert all(row["computed"] <= row["tokens"] <= row["limit"] for row in rows)
        seen |= set(blocks["cells"])
        sizes.add(per_cell)
        phases |= {row["phase"] for row in rows}
    assert engine.stats()["preemptions"] > 0 and phases == {"prefill", "decode"}
    assert {CACHED, FREE, 0} <= seen and (cells == 7 or SHARED in seen)
    assert sizes == ({1, 2} if cells == 7 else {1})
    engine.close()


@pytest.mark.parametrize("before", [0, 20_000])
def test_blocks_that_a_step_in_flight_still_uses_are_leaving(before):
    engine = engine_of(run_ahead=1, num_blocks=before + 48)
    engine.scheduler.pool.allocate(before)
    engine.submit(engine.prepare(PROMPT, LONG))
    engine.step()
    engine.abort("request-1")
    state = described(engine)
    assert state["rows"] == [] and state["blocks"]["used"] - before == state["blocks"]["cells"].count(LEAVING) > 0
    engine.close()


def test_a_row_is_in_prefill_until_its_first_token():
    engine = engine_of(run_ahead=0, max_num_batched_tokens=8)
    engine.submit(engine.prepare(PROMPT, LONG))
    prompt, seen = len(engine.tokenizer.encode(PROMPT)), []
    for _ in range(4):
        engine.step()
        (row,) = described(engine)["rows"]
        seen.append((row["phase"], row["computed"], row["tokens"]))
    chunks = -(-prompt // 8)
    whole = [("prefill", min(8 * i, prompt), prompt) for i in range(1, chunks)]
    assert 1 < chunks < 4
    assert seen == (whole + [("decode", prompt + i, prompt + i + 1) for i in range(4)])[:4]
    engine.close()


@pytest.mark.parametrize("stream", [False, True])
def test_the_tables_tell_all_holdings_at_once(stream):
    """Also where a row gives blocks back while it runs."""
    options = {"attention_sinks": 4, "attention_window": 32, "max_model_len": 128} if stream else {}
    engine = engine_of(run_ahead=0, **options)
    for index in range(3):
        engine.submit(engine.prepare(PROMPT[index:], SamplingParams(max_tokens=70 + index, ignore_eos=True)))
    for _ in range(68):
        engine.step()
    scheduler = engine.scheduler
    rows, blocks = scheduler.tables.holdings(scheduler.order)
    assert len(scheduler.order) == 3 and scheduler.tables.gone.any() == stream
    for row in scheduler.order:
        assert blocks[rows == row].tolist() == scheduler.tables.of(row).tolist()
    engine.close()


def test_the_tables_tell_the_holdings_of_layers_that_see_a_window():
    scheduler = Scheduler(
        max_num_seqs=3,
        max_num_batched_tokens=64,
        max_model_len=256,
        block_size=16,
        num_blocks=64,
        windows=(None, 32),
    )
    for index in range(3):
        scheduler.submit(Request(f"r{index}", np.arange(40 + index, dtype=np.int32), LONG, limit=200))
    for _ in range(80):
        step = scheduler.schedule()
        scheduler.complete(step, np.full(int(step.samples.sum()), 7))
    rows, blocks = scheduler.tables.holdings(scheduler.order)
    assert len(scheduler.order) == 3 and scheduler.tables.gone.any()
    for row in scheduler.order:
        assert sorted(blocks[rows == row].tolist()) == sorted(scheduler.tables.of(row).tolist())


# ---- limits


def test_the_state_is_bounded_whatever_the_batch_and_the_pool(monkeypatch):
    engine = engine_of(num_blocks=30_000, max_num_seqs=100, max_num_batched_tokens=4096, run_ahead=0)
    name = "x" * 5000
    engine.submit(engine.prepare([5] * 40, LONG, request_id=name))
    for index in range(99):
        engine.submit(engine.prepare([index + 6] * 40, LONG))
    engine.step()
    state = described(engine)
    assert (state["running"], len(state["rows"])) == (100, room.LISTED)
    assert state["rows"][0]["id"] == "x" * (room.SHOWN - 1) + "…"
    assert len(json.dumps(state)) < 40_000
    looked = []
    monkeypatch.setattr(BlockPool, "are_cached", lambda pool, blocks: [looked.append(block) for block in blocks])
    described(engine)
    assert len(looked) <= room.CELLS  # one by one, while the engine waits
    engine.close()


def test_of_a_large_pool_the_used_part_is_drawn_one_block_a_cell(monkeypatch):
    """A map of the whole pool would show ten requests as a few cells, and thousands that are free."""
    engine = engine_of(num_blocks=30_000, run_ahead=0)
    engine.submit(engine.prepare(PROMPT, LONG))
    while engine.has_work:
        engine.step()
    idle = described(engine)["blocks"]
    cached = idle["cached"]
    assert (idle["first"], len(idle["cells"])) == (0, 128) and idle["cells"].count(CACHED) == cached > 1
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "_LINE", 1)
        shortest = described(engine)["blocks"]["cells"]
        assert (
            shortest == idle["cells"][: len(shortest)] and shortest.count(CACHED) == cached and shortest[-1] == CACHED
        )
    engine.scheduler.pool.allocate(19_990)
    for index in range(4):
        engine.submit(engine.prepare([index + 5] * 70, LONG))
    engine.step()
    state = described(engine)
    blocks, held = state["blocks"], [row["blocks"] for row in state["rows"]]
    assert [blocks["cells"].count(row["row"]) for row in state["rows"]] == held == [5, 5, 5, 5]
    first = 19_990 // 128 * 128
    assert (blocks["per_cell"], blocks["first"], blocks["filled"]) == (1, first, None)
    assert len(blocks["cells"]) == 128 and blocks["cells"].count(FREE) == 128 - 20
    assert blocks["more"] == {"free": 30_000 - 128 - cached, "cached": cached}
    engine.close()


def test_used_blocks_that_lie_far_apart_share_cells():
    engine = engine_of(num_blocks=30_000, run_ahead=0)
    for token, between in ((5, 20_000), (6, 0)):
        engine.submit(engine.prepare([token] * 40, LONG))
        engine.step()
        engine.scheduler.pool.allocate(between)
    blocks = described(engine)["blocks"]
    assert (blocks["first"], blocks["per_cell"], len(blocks["cells"])) == (0, 15, 2000)
    assert sum(blocks["filled"]) == sum(row["blocks"] for row in described(engine)["rows"]) == 6
    assert blocks["more"] == {"free": 0, "cached": 0}
    engine.close()


def test_many_who_ask_share_one_snapshot_and_a_slow_one_is_kept_longer(monkeypatch):
    engine, now = engine_of(), [100.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    source = ByHand(engine)
    states = EngineRoom(source, Metrics("m"), lambda task: task())
    first = states.state()
    now[0] += 50  # a long step: who asks meanwhile waits for the same snapshot
    assert states.state() is first and len(source.asked) == 1

    def answer(took):
        taken = vars(Snapshot.of(engine, 8, 8)) | {"took": took}
        source.asked[-1].set_result(Snapshot(**taken))

    answer(took=0.0)
    assert json.loads(first.result())["model"] == "m"
    now[0] += 0.9 * room.PERIOD
    assert states.state() is first
    now[0] += 0.2 * room.PERIOD
    second = states.state()
    assert second is not first and len(source.asked) == 2
    answer(took=0.1)
    now[0] += 0.99 * room.PATIENCE * 0.1
    assert states.state() is second
    now[0] += 0.02 * room.PATIENCE * 0.1
    third = states.state()
    source.asked[-1].set_exception(ValueError("no"))
    assert isinstance(third.exception(), ValueError)
    assert states.state() is third and len(source.asked) == 3  # nor is one that failed taken again at once
    now[0] += 1.1 * room.PERIOD
    assert states.state() is not third
    engine.close()


def test_nothing_is_copied_while_nobody_asks(http, monkeypatch):
    taken = []
    monkeypatch.setattr(Snapshot, "of", lambda *arguments: taken.append(arguments) or 1 / 0)
    assert http.post("/v1/completions", json={"prompt": "The river", "max_tokens": 4}).status_code == 200
    assert http.get("/").status_code == http.get("/metrics").status_code == 200
    assert not taken


# ---- the state over HTTP


def new_state(server, http):
    """Not the one that an earlier test asked for."""
    server.hub.engine_room._renew_at = 0.0
    return http.get("/engine/state")


@contextmanager
def steps_by_hand():
    """Engines wait before each step; yields a function that lets one more begin."""
    may = threading.Semaphore(0)

    def embedding(ids, weight, scale):
        assert may.acquire(timeout=TIMEOUT), "the test let no further step begin"
        return weight[ids] * scale

    with minillm.using(embedding=embedding):
        try:
            yield may.release
        finally:
            may.release(10_000)


def test_a_client_sees_the_requests_in_flight_but_nothing_of_their_prompts(server, http):
    wait_until(lambda: server.engine.stats()["running"] == 0)
    secret = "a lighthouse keeper named Adalbert"
    body = {"prompt": secret, "max_tokens": 30, "ignore_eos": True, "n": 3}
    with ThreadPoolExecutor(2) as pool, steps_by_hand() as step:
        sent = pool.submit(http.post, "/v1/completions", json=body)
        step()
        wait_until(lambda: server.engine.stats()["running"] == 3)
        asked = pool.submit(new_state, server, http)
        wait_until(lambda: server.engine._snapshots or asked.done())
        assert not asked.done()  # the step that runs is not interrupted
        while not asked.done():
            step()
        answer = asked.result()
    ids = server.engine.tokenizer.encode(secret)
    state = answer.json()
    assert answer.headers["content-type"] == "application/json" and answer.headers["cache-control"] == "no-store"
    assert state["model"] == server.model and state["running"] == len(state["rows"]) == 3
    assert all(row["prompt"] == len(ids) for row in state["rows"])
    assert state["blocks"]["used"] == sum(cell not in (FREE, CACHED) for cell in state["blocks"]["cells"]) > 0
    assert sent.result().status_code == 200
    assert not any(word in answer.text for word in ("lighthouse", "keeper", "Adalbert", json.dumps(ids)[1:-1]))


def test_the_latencies_are_of_the_newest_requests(server, http):
    body = {"prompt": "The river", "max_tokens": 6, "ignore_eos": True}
    assert http.post("/v1/completions", json=body | {"stream": True}).status_code == 200
    latency = new_state(server, http).json()["latency"]
    for times in latency.values():
        assert 0 < times["p50"] <= times["p95"] <= times["p99"] < TIMEOUT


def test_the_state_needs_the_key_but_the_page_does_not():
    key = "a-key-of-23-characters!"
    with (
        minillm.LLM(device="cpu", num_blocks=32) as llm,
        running(llm, api_key=key) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT) as client,
    ):
        assert [client.get(path).status_code for path in FILES] == [200] * len(FILES)
        assert client.get("/engine/state").status_code == 401
        assert client.get("/engine/state", headers={"authorization": "Bearer another-key"}).status_code == 401
        answer = client.get("/engine/state", headers={"authorization": f"Bearer {key}"})
        assert answer.json()["blocks"]["total"] == 32


def test_a_user_supplied_pool_that_fails_fails_the_state_alone(server, http):
    def fail(pool, blocks):
        raise ValueError("this pool cannot tell")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockPool, "are_cached", fail)
        answer = new_state(server, http)
        assert answer.status_code == 500 and "this pool cannot tell" in answer.text
        assert http.post("/v1/completions", json={"prompt": "The river", "max_tokens": 4}).status_code == 200
    assert new_state(server, http).status_code == 200


def test_who_waits_for_a_snapshot_learns_that_the_engine_has_failed():
    async_llm = minillm.AsyncLLM(device="cpu", num_blocks=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "stats", lambda engine: (_ for _ in ()).throw(KeyboardInterrupt()))
        thread = async_llm._thread
        hook, threading.excepthook = threading.excepthook, lambda _: None
        try:
            first = async_llm.snapshot(8, 8)
            assert str(first.exception(TIMEOUT)) == "the engine's thread ended: KeyboardInterrupt()"
            thread.join(TIMEOUT)
        finally:
            threading.excepthook = hook
    with pytest.raises(minillm.errors.EngineClosed):
        async_llm.snapshot(8, 8)
    assert not async_llm._snapshots


def test_a_percentile_counts_each_value_as_often_as_it_occurred():
    recent = Recent()
    assert recent.percentiles(50) == {"p50": None}
    recent.add(3.0)
    recent.add(1.0, 98)
    recent.add(2.0)
    assert recent.percentiles(50, 98, 99, 100) == {"p50": 1.0, "p98": 1.0, "p99": 2.0, "p100": 3.0}
    for _ in range(5000):
        recent.add(7.0)
    assert recent.percentiles(1) == {"p1": 7.0} and np.isfinite(recent.percentiles(99)["p99"])
