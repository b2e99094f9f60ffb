"""An engine of replicas: requests follow their prefixes, and go on elsewhere when a replica is lost."""

import asyncio
import base64
import json
import threading
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from minillm.deploy import handshake, places, replicas
from minillm.deploy.handshake import Address, new_secret
from minillm.deploy.replicas import MOVES, ReplicatedEngine, joined
from minillm.engine.async_llm import AsyncLLM
from minillm.errors import InvalidRequest
from minillm.prompts import EMBEDDED
from minillm.request import Request, RequestOptions, SamplingParams
from minillm.server.wire import Adapters, Alive, Gauges, Hello, State
from minillm.server.worker.choice import Prompt
from minillm.server.worker.link import Busy, EngineError, EngineGone
from tests import models, peft_files
from tests.deploy.stand_ins import LocalRay, LocalReplica, collect, connected, homes, local_replicas
from tests.waiting import TIMEOUT, async_wait_until, idle, paused_steps, wait_until

pytestmark = pytest.mark.timeout(TIMEOUT)

PROMPT = list(range(5, 45))
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True)


def run(engine, work, count=2, *, expected=0, options=None, **more):
    """Run `work(replicated, ray)` with an engine of replicas; expected: choices that are to go on elsewhere."""
    moved = []

    async def everything():
        with local_replicas(engine, count, **(options or {})) as ray:
            async with connected(ray, moved=moved.append, **more) as replicated:
                return await work(replicated, ray)

    found = asyncio.run(everything())
    assert expected is None or sum(moved) == expected
    wait_until(lambda: idle(engine))
    return found


def alone(engine, params=GREEDY, prompt=PROMPT, options=None):
    return asyncio.run(engine.generate(prompt, params, options=options))


def lose_one(engine, params, *, prompts=(PROMPT,), n=1, after=4, expected=1, options=None, partly=False):
    """Run a request and kill its replica after some steps. Returns its completions, and the deltas of each choice."""
    deltas = {}

    def see(choice, delta):
        deltas.setdefault(choice.index, []).append(delta)

    async def work(replicated, ray):
        with paused_steps(free=after) as resume:
            answer = asyncio.ensure_future(collect(replicated, prompts, params, n, options, see, partly))
            await async_wait_until(lambda: len(deltas) == len(prompts) * n or answer.done())
            (name,) = homes(replicated)
            await asyncio.to_thread(ray.replicas.pop(name).kill)
            resume.set()
            return await answer

    return run(engine, work, expected=expected), deltas


# ---- without faults


def test_the_answers_are_the_engines_own(engine):
    async def work(replicated, ray):
        greedy = await collect(replicated, [PROMPT, PROMPT[:7]], GREEDY)
        sampled = await collect(replicated, [PROMPT], SAMPLED, n=3)
        return greedy, sampled

    greedy, sampled = run(engine, work)
    assert [greedy[i].token_ids for i in (0, 1)] == [
        alone(engine, GREEDY, each).token_ids for each in (PROMPT, PROMPT[:7])
    ]
    for i, params in enumerate(SAMPLED.choices(3)):
        assert sampled[i].token_ids == alone(engine, params).token_ids


def test_a_place_is_held_as_long_as_the_request_runs(engine):
    async def work(replicated, ray):
        with paused_steps(free=3) as resume:
            source = replicated.stream([Prompt(PROMPT)], GREEDY)
            await anext(source)
            await async_wait_until(lambda: sum(ray.held.values()) == 1)
            assert ray.held[homes(replicated)[0]] == 1
            resume.set()
            async for _ in source:
                pass
        replicated.listed({})  # and so nothing is kept for the next request
        await async_wait_until(lambda: not sum(ray.held.values()))

    run(engine, work)


def test_a_client_that_leaves_frees_the_place_and_the_engine(engine):
    async def work(replicated, ray):
        with paused_steps(free=3):
            source = replicated.stream([Prompt(PROMPT)], GREEDY)
            await anext(source)
            await source.aclose()

    run(engine, work)


def test_a_client_that_leaves_before_it_has_a_place_takes_none(engine):
    async def work(replicated, ray):
        replicated.listed({})
        source = replicated.stream([Prompt(PROMPT)], GREEDY)
        first = asyncio.ensure_future(anext(source))
        await async_wait_until(lambda: replicated._requests)
        await asyncio.sleep(0)
        assert not homes(replicated)
        first.cancel()
        await asyncio.wait([first])

    run(engine, work)


def test_a_conversation_stays_where_it_began(engine):
    async def work(replicated, ray):
        first = (await collect(replicated, [PROMPT], GREEDY))[0]
        await collect(replicated, [[9] * 40], GREEDY)
        second = PROMPT + first.token_ids + [3, 4, 5]
        return (await collect(replicated, [second], GREEDY))[0]

    where = []
    answer = run(engine, work, tell=lambda what: where.append(what["replica"]))
    assert where[::2] == where[1::2], "each request begins and ends on the same replica"
    assert where[0] == where[4] != where[2]
    assert answer.num_cached_tokens >= 48


def test_requests_that_come_together_are_spread(engine):
    async def work(replicated, ray):
        prompts = [[place] * 8 for place in range(5, 11)]
        with paused_steps() as resume:
            answers = [asyncio.ensure_future(collect(replicated, [each], GREEDY)) for each in prompts]
            await async_wait_until(lambda: len(homes(replicated)) == 6)
            found = sorted(homes(replicated))
            resume.set()
            await asyncio.gather(*answers)
        return found

    assert run(engine, work) == ["a"] * 3 + ["b"] * 3


def test_no_request_waits_for_its_place(engine):
    async def work(replicated, ray):
        asked = asyncio.Event()

        @asynccontextmanager
        async def never(name, worker):
            asked.set()
            await asyncio.Event().wait()
            yield name

        replicated._places._reserve = never
        with paused_steps(free=3) as resume:
            answer = asyncio.ensure_future(collect(replicated, [PROMPT], GREEDY))
            await asked.wait()
            resume.set()
            found = (await answer)[0].token_ids
        for task in replicated._places._tasks:
            task.cancel()
        return found

    assert run(engine, work) == alone(engine).token_ids


def test_the_salt_is_part_of_the_prefix(engine):
    async def work(replicated, ray):
        seen = []
        replicated._router.policy = lambda candidates: seen.append([each.cached for each in candidates]) or candidates
        for salt in ("one", "another", "one"):
            await collect(replicated, [PROMPT], GREEDY, options=RequestOptions(cache_salt=salt))
        await collect(replicated, [PROMPT], GREEDY, options=RequestOptions(use_prefix_cache=False))
        return [max(each) for each in seen]

    assert run(engine, work, count=1) == [0, 0, 32, 0]


def embedded(engine, ids=PROMPT, change=0.0) -> Prompt:
    """A prompt whose first tokens are given as their embeddings, the first of which may be changed."""
    model, count = engine.engine.model, len(ids) - 4
    values = model.ops.embedding(torch.tensor(ids[:count]), model.embedding, model.embedding_scale).numpy().copy()
    values[0, 0] += change
    return Prompt([EMBEDDED] * count + list(ids[count:]), values=base64.b64encode(values.data).decode())


def test_embeddings_are_part_of_the_prefix(engine):
    async def work(replicated, ray):
        seen = []
        replicated._router.policy = lambda candidates: seen.append([each.cached for each in candidates]) or candidates
        prompts = [embedded(engine), embedded(engine, change=1.0), embedded(engine), PROMPT]
        done = [(await collect(replicated, [each], GREEDY))[0].token_ids for each in prompts]
        return [max(each) for each in seen], done

    cached, done = run(engine, work, count=1)
    assert cached == [0, 0, 32, 0] and done[0] == done[2] == done[3] == alone(engine).token_ids


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """Engines of a model: the first has adapters one and two and a soft prompt, the next two alone, the last none."""
    place = tmp_path_factory.mktemp("adapted")
    models.make("gemma-grouped").save_pretrained(place / "model")
    for seed, name in enumerate(["one", "two"]):
        peft_files.write(place / name, place / "model", seed)
    (place / "soft").mkdir()
    soft = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2}
    (place / "soft" / "adapter_config.json").write_text(json.dumps(soft))
    hidden = json.loads((place / "model" / "config.json").read_text())["hidden_size"]
    values = torch.linspace(-1, 1, 2 * hidden).view(2, hidden)
    save_file({"prompt_embeddings": values}, place / "soft" / "adapter_model.safetensors")
    named = [{name: place / name for name in names} for names in (("one", "soft", "two"), ("two",), ())]
    engines = [AsyncLLM(place / "model", adapters=each, device="cpu", max_num_seqs=8) for each in named]
    yield engines
    for each in engines:
        each.close()


def run_adapted(engines, work):
    """Run `work(replicated)` with a replica of each of two engines, a and b."""

    async def everything():
        made = [LocalReplica(engine, name) for engine, name in zip(engines, "ab", strict=True)]
        try:
            async with connected(LocalRay(*made)) as replicated:
                return await work(replicated)
        finally:
            for each in made:
                each.kill()

    return asyncio.run(everything())


def test_the_adapter_is_part_of_the_prefix_by_the_load_of_each_replica(adapted):
    """Adapter two is load 2 of the first engine, and load 1 of the other one."""
    seen = []

    async def work(replicated):
        replicated._router.policy = lambda candidates: seen.append(sorted(candidates)) or seen[-1]  # a before b
        for name in ("two", None, "two", "soft", "soft"):
            await collect(replicated, [PROMPT], GREEDY, options=RequestOptions(adapter=name))
        return [replicated._replicas[name].identity(RequestOptions("salt", adapter="two")) for name in "ab"]

    identities = run_adapted(adapted[:2], work)
    requests = [
        Request("r", np.zeros(1, np.int32), GREEDY, 9, options=RequestOptions("salt"), load=load, cache_dtype="float32")
        for load in (2, 1)
    ]
    assert identities == [each.cache_key for each in requests], "those of the engines"
    cached = [{each.replica: each.cached for each in candidates} for candidates in seen]
    assert cached[0] == cached[1] == {"a": 0, "b": 0}, "another adapter's prefix is none of the model's own"
    assert cached[2] == {"a": 32, "b": 0}
    assert cached[3:] == [{"a": 0}, {"a": 32}], "a soft prompt's is neither, and only the first engine has one"


def test_a_request_goes_where_its_adapter_is(adapted):
    async def work(replicated):
        where, own = [], replicated._router.begin
        replicated._router.begin = lambda name, *rest: where.append(name) or own(name, *rest)
        done = [
            (await collect(replicated, [PROMPT], GREEDY, options=RequestOptions(adapter="one")))[0].token_ids
            for _ in range(3)
        ]
        with pytest.raises(InvalidRequest, match="adapter 'three' is not loaded in any replica"):
            await collect(replicated, [PROMPT], GREEDY, options=RequestOptions(adapter="three"))
        return where, done, await replicated.ask(Adapters())

    where, done, names = run_adapted(adapted[:2], work)
    assert where == ["a"] * 3 and sorted(names) == ["one", "soft", "two"]
    assert done == [alone(adapted[0], options=RequestOptions(adapter="one")).token_ids] * 3 != [alone(adapted[0])] * 3


def test_adapters_of_some_replicas_are_known_whichever_says_hello_last(adapted):
    """In an update, say, the new replicas may have none."""

    async def work(replicated):
        facts = []
        for name in "ab":
            replica = replicated._replicas[name]
            replicated.met(replica, Hello(replica.facts, None))
            facts.append(replicated.facts.takes_adapters)
        return facts

    assert run_adapted(adapted[::2], work) == [True, True]


def test_requests_without_a_seed_have_one_of_their_own_for_each_prompt(engine):
    params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)

    async def work(replicated, ray):
        return await collect(replicated, [PROMPT, PROMPT], params, n=2)

    found = run(engine, work)
    assert len({tuple(each.token_ids) for each in found.values()}) == 4


def test_errors_of_requests_are_the_engines_own(engine):
    async def work(replicated, ray):
        with pytest.raises(Exception, match="prompt") as found:
            await collect(replicated, [[5] * 300], GREEDY)
        return type(found.value).__name__

    assert run(engine, work) in ("TooLong", "InvalidRequest")


def test_a_busy_replica_refuses_as_one_engine_does(engine):
    async def work(replicated, ray):
        with paused_steps(), pytest.raises(Busy) as found:
            await collect(replicated, [[5, 6]] * 40, GREEDY)
        return found.value.retry_after

    assert run(engine, work, options={"max_queued": 0}) >= 1


def test_questions_are_answered_while_any_replica_is_there(engine):
    async def work(replicated, ray):
        both = await replicated.ask(Gauges())
        state = await replicated.ask(State())
        await asyncio.to_thread(ray.replicas.pop("a").kill)
        await async_wait_until(lambda: len(replicated._replicas) == 1)
        one = await replicated.ask(Gauges())
        assert await replicated.ask(Alive()) is True
        await asyncio.to_thread(ray.replicas.pop("b").kill)
        await async_wait_until(lambda: not replicated.alive)
        with pytest.raises(EngineGone):
            await replicated.ask(Alive())
        return both, one, state

    both, one, state = run(engine, work)
    assert '"running"' in state

    def value(answer, name):
        return next(samples[0][2] for family, _, _, samples in answer["families"] if family == name)

    assert (both["alive"], value(both, "minillm_replicas_up"), value(one, "minillm_replicas_up")) == (True, 2, 1)
    assert value(both, "minillm_engine_blocks") == 2 * value(one, "minillm_engine_blocks")


def test_shares_of_replicas_are_averaged_and_facts_are_not_added():
    def families(share, running):
        return [
            ["x_perc", "gauge", "", [["x_perc", {"m": "1"}, share]]],
            ["running", "gauge", "", [["running", {"m": "1"}, running]]],
            ["x_info", "gauge", "", [["x_info", {"size": "16"}, 1]]],
        ]

    values = {name: samples[0][2] for name, _, _, samples in joined(families(0.5, 3), families(0.1, 4))}
    assert values == {"x_perc": pytest.approx(0.3), "running": 7, "x_info": 1}


def test_what_one_worker_routes_another_one_learns(engine):
    told = []

    async def work(replicated, ray):
        await collect(replicated, [PROMPT], GREEDY)
        await async_wait_until(lambda: len(told) == 2)
        async with connected(ray) as other:
            for what in told:
                other.learn(what | {"worker": 1})
            keys = []
            other._router.policy = lambda candidates: keys.extend(candidates) or candidates
            await collect(other, [PROMPT + [1] * 20], GREEDY)
            return {each.replica: each.cached for each in keys}, told[0]["replica"]

    cached, home = run(engine, work, tell=told.append)
    assert cached == {home: 32, "b" if home == "a" else "a": 0}


def test_requests_of_other_workers_are_load_too(engine):
    where, loads = [], []

    async def work(replicated, ray):
        policy = replicated._router.policy
        replicated._router.policy = lambda found: loads.append({e.replica: e.load for e in found}) or policy(found)
        for worker, requests in ((1, 3), (2, 1), (1, 2)):
            replicated.learn({"worker": worker, "replica": "a", "keys": "", "requests": requests})
        await collect(replicated, [[5] * 8], GREEDY)
        replicated.learn({"worker": 2, "replica": "b", "keys": "", "requests": 1})
        await collect(replicated, [[6] * 8], GREEDY)
        replicated.forget(1)
        await collect(replicated, [[7] * 8], GREEDY)

    run(engine, work, tell=lambda what: where.append((what["replica"], what["requests"])))
    assert where[0] == ("b", 1) and where[1] == ("b", 0)
    assert loads[0]["a"] > loads[0]["b"] == 0
    assert loads[1]["a"] == 3 * loads[1]["b"] and loads[2]["a"] == loads[2]["b"] > 0


# ---- a replica is lost


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SAMPLED,
        SamplingParams(max_tokens=24, temperature=0.8, top_k=20, seed=3, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(max_tokens=24, min_tokens=20, temperature=0, logprobs=2),
    ],
    ids=["greedy", "sampled", "general", "min_tokens and logprobs"],
)
def test_a_running_stream_goes_on_elsewhere_with_the_same_tokens(engine, params):
    done, deltas = lose_one(engine, params)
    wanted = alone(engine, params)
    assert done[0].token_ids == wanted.token_ids
    assert (done[0].text, done[0].finish_reason) == (wanted.text, wanted.finish_reason)
    assert [token for delta in deltas[0] for token in delta.token_ids] == wanted.token_ids, "sent twice, or never"
    assert "".join(delta.text for delta in deltas[0]) == wanted.text
    if params.logprobs:
        assert [each.keys() for each in done[0].logprobs] == [each.keys() for each in wanted.logprobs]
    assert done[0].prompt_token_ids == PROMPT


def test_all_choices_go_on_elsewhere_each_with_its_own_seed(engine):
    done, _ = lose_one(engine, SAMPLED, prompts=(PROMPT, PROMPT[:9]), n=2, expected=4, after=6)
    for place, prompt in enumerate((PROMPT, PROMPT[:9])):
        for i, params in enumerate(SAMPLED.choices(2)):
            assert done[2 * place + i].token_ids == alone(engine, params, prompt).token_ids


def test_a_stream_without_a_seed_goes_on_with_the_numbers_that_it_began_with(engine, monkeypatch):
    seeds, original = [], replicas._seeds
    monkeypatch.setattr(replicas, "_seeds", lambda *given: seeds.append(original(*given)) or seeds[-1])
    params = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True)
    done, _ = lose_one(engine, params)
    (seed,) = seeds[0].values()
    wanted = SamplingParams(max_tokens=24, temperature=1.0, seed=seed, ignore_eos=True)
    assert done[0].token_ids == alone(engine, wanted).token_ids


def test_a_stop_string_that_spans_the_move_ends_the_stream(engine):
    text = alone(engine).text
    stop = text[len(text) // 6 : len(text) // 3]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, stop=[stop])
    wanted = alone(engine, params)
    assert wanted.finish_reason == "stop" and len(wanted.token_ids) > 4
    done, _ = lose_one(engine, params, after=3)
    assert (done[0].text, done[0].finish_reason, done[0].stop_reason) == (wanted.text, "stop", stop)


def test_cached_tokens_are_those_of_the_first_replica(engine):
    done, _ = lose_one(engine, GREEDY, options=RequestOptions(cache_salt="never used before"))
    assert done[0].num_cached_tokens == 0


def test_a_prompt_of_embeddings_goes_on_elsewhere_with_them(engine):
    done, _ = lose_one(engine, SAMPLED, prompts=(embedded(engine), embedded(engine)), n=2, expected=4)
    assert done[0].token_ids == done[2].token_ids == alone(engine, SAMPLED).token_ids


def test_a_scored_prompt_is_reported_once(engine):
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=0)
    done, _ = lose_one(engine, params)
    assert len(done[0].prompt_logprobs) == len(PROMPT)


@pytest.mark.parametrize(
    "more", [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"regex": "[a-z]{20}", "ignore_eos": False}]
)
def test_a_stream_that_could_not_go_on_as_it_began_ends_with_an_error(engine, more):
    params = SamplingParams(**{"max_tokens": 24, "temperature": 0, "ignore_eos": True} | more)
    with pytest.raises(EngineGone, match="has ended, and .*: send it again"):
        lose_one(engine, params, expected=0)
    wait_until(lambda: idle(engine))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=6, temperature=0, regex="[a-z]{20}")])
def test_a_request_that_waits_runs_elsewhere_whatever_its_parameters_are(engine, params):
    async def work(replicated, ray):
        with paused_steps() as resume:
            answer = asyncio.ensure_future(collect(replicated, [PROMPT], params))
            await async_wait_until(lambda: engine.stats()["running"] or engine.stats()["waiting"])
            (name,) = homes(replicated)
            await asyncio.to_thread(ray.replicas.pop(name).kill)
            resume.set()
            return await answer

    assert run(engine, work, expected=1)[0].token_ids == alone(engine, params).token_ids


def test_many_requests_survive_the_loss_of_a_replica_under_load(engine):
    prompts, moved = [[5 + place, *PROMPT] for place in range(24)], []

    async def work(replicated, ray):
        replicated._moved = moved.append
        with paused_steps(free=8) as resume:
            answers = [asyncio.ensure_future(collect(replicated, [each], SAMPLED)) for each in prompts]
            await async_wait_until(lambda: len(homes(replicated)) == len(prompts))
            lost = homes(replicated).count("a")
            await asyncio.to_thread(ray.replicas.pop("a").kill)
            resume.set()
            found = await asyncio.gather(*answers)
        assert 0 < lost < len(prompts), "both replicas have work"
        assert sum(moved) == lost
        return found, lost

    found, lost = run(engine, work, expected=None)
    assert [each[0].token_ids for each in found] == [alone(engine, SAMPLED, each).token_ids for each in prompts]


def test_a_moved_request_waits_while_the_other_replica_is_full(engine, monkeypatch):
    monkeypatch.setattr(replicas, "AGAIN", 0.01)

    async def work(replicated, ray):
        with paused_steps(free=6) as resume:
            # Each replica takes 32 choices: those of one replica have no room on the other.
            answers = [asyncio.ensure_future(collect(replicated, [[place, *PROMPT]], GREEDY, n=30)) for place in (5, 6)]
            await async_wait_until(lambda: len(homes(replicated)) == 2)
            await async_wait_until(lambda: sum(each.hub.running for each in ray.replicas.values()) == 60)
            await asyncio.to_thread(ray.replicas.pop("a").kill)
            resume.set()
            return await asyncio.gather(*answers)

    found = run(engine, work, expected=30, options={"max_queued": 0})
    for place, answer in zip((5, 6), found, strict=True):
        assert {tuple(each.token_ids) for each in answer.values()} == {
            tuple(alone(engine, GREEDY, [place, *PROMPT]).token_ids)
        }


def test_a_request_that_ends_every_replica_is_given_up(engine):
    async def work(replicated, ray):
        with paused_steps() as resume:
            answer = asyncio.ensure_future(collect(replicated, [PROMPT], GREEDY))
            for _ in range(MOVES + 1):
                await async_wait_until(lambda: any(each.requests for each in replicated._replicas.values()))
                (name,) = homes(replicated)
                await asyncio.to_thread(ray.replicas.pop(name).kill)
                await async_wait_until(lambda name=name: name not in homes(replicated))
            with pytest.raises(EngineGone, match=f"{MOVES + 1} replicas have ended while they ran this request"):
                await answer
            resume.set()

    run(engine, work, count=MOVES + 1, expected=MOVES)


def test_without_replicas_requests_are_refused_at_once_and_accepted_again_later(engine):
    async def work(replicated, ray):
        lost = ray.replicas.pop("a")
        await asyncio.to_thread(lost.kill)
        await async_wait_until(lambda: not replicated.alive)
        with pytest.raises(EngineGone) as found:
            await collect(replicated, [PROMPT], GREEDY)
        ray.replicas["b"] = LocalReplica(engine, "b")
        replicated.listed(ray.addresses)
        await async_wait_until(lambda: replicated.alive)
        answer = await collect(replicated, [PROMPT], GREEDY)
        await asyncio.to_thread(ray.replicas["b"].kill)
        return found.value.retry_after, answer[0].token_ids

    after, tokens = run(engine, work, count=1)
    assert after == replicas.RETRY_AFTER
    assert tokens == alone(engine).token_ids


def test_a_stream_waits_for_a_new_replica_if_there_is_no_other(engine):
    async def work(replicated, ray):
        with paused_steps(free=4) as resume:
            source = replicated.stream([Prompt(PROMPT)], GREEDY)
            tokens = (await anext(source))[1].token_ids
            await asyncio.to_thread(ray.replicas.pop("a").kill)
            await async_wait_until(lambda: not replicated.alive)
            ray.replicas["b"] = LocalReplica(engine, "b")
            replicated.listed(ray.addresses)
            resume.set()
            async for _, delta in source:
                tokens = tokens + delta.token_ids
        await asyncio.to_thread(ray.replicas["b"].kill)
        return tokens

    assert run(engine, work, count=1, expected=1) == alone(engine).token_ids


def test_a_stream_that_finds_no_replica_in_time_ends_with_an_error(engine, monkeypatch):
    monkeypatch.setattr(replicas, "WAIT", 0.1)

    async def work(replicated, ray):
        with paused_steps(free=4) as resume:
            source = replicated.stream([Prompt(PROMPT)], GREEDY)
            await anext(source)
            await asyncio.to_thread(ray.replicas.pop("a").kill)
            with pytest.raises(EngineGone, match="no replica of this model runs: try again in"):
                async for _ in source:
                    pass
            resume.set()

    run(engine, work, count=1, expected=1)


def test_a_replica_that_does_not_answer_ray_is_avoided(engine, monkeypatch):
    """One whose machine is frozen, for example."""
    where = []

    async def work(replicated, ray):
        await collect(replicated, [PROMPT], GREEDY)
        replicated._avoid(where[0])
        await collect(replicated, [PROMPT], GREEDY)
        replicated._avoid(where[2])
        await collect(replicated, [PROMPT], GREEDY)
        monkeypatch.setattr(replicas, "AVOID", -1.0)
        for name in where[:3:2]:
            replicated._avoid(name)
        await collect(replicated, [PROMPT], GREEDY)

    run(engine, work, tell=lambda what: where.append(what["replica"]))
    assert where[2] != where[0], "although the prefix is cached there"
    assert len(where) == 8, "the request runs although both are to be avoided"


def test_a_connection_that_only_broke_is_made_again(engine):
    async def work(replicated, ray):
        before = replicated._replicas["a"]
        before._link.transport.abort()
        await async_wait_until(lambda: replicated._replicas.get("a") not in (None, before))
        return await collect(replicated, [PROMPT], GREEDY)

    assert run(engine, work, count=1)[0].token_ids == alone(engine).token_ids


class Slow:
    """Makes a replica say hello only when told to, and close its first connections before. met: all connections."""

    def __init__(self, replica: LocalReplica, closed: int = 0):
        self.met, self.go, self.closed = [], threading.Event(), closed
        self._connect, replica.hub.connect = replica.hub.connect, self.connect

    def connect(self, sock):
        self.met.append(sock)
        if len(self.met) <= self.closed:
            sock.close()
        elif self.go.wait(TIMEOUT):
            self._connect(sock)


def test_a_replica_that_is_listed_again_and_again_has_one_connection(engine):
    async def work(replicated, ray):
        ray.replicas["c"] = LocalReplica(engine, "c")
        slow = Slow(ray.replicas["c"])
        for _ in range(10):
            replicated.listed(ray.addresses)
            await asyncio.sleep(0.01)
        await async_wait_until(lambda: slow.met)
        slow.go.set()
        await async_wait_until(lambda: len(replicated._replicas) == 3)
        await asyncio.to_thread(ray.replicas["c"].kill)
        await async_wait_until(lambda: len(replicated._replicas) == 2)
        return len(slow.met)

    assert run(engine, work) == 1


def test_a_replica_that_closes_the_connection_before_it_says_hello_is_tried_again(engine):
    async def work(replicated, ray):
        ray.replicas["c"] = LocalReplica(engine, "c")
        slow = Slow(ray.replicas["c"], closed=2)
        slow.go.set()
        replicated.listed(ray.addresses)
        await async_wait_until(lambda: len(replicated._replicas) == 3)
        await asyncio.to_thread(ray.replicas["c"].kill)
        return len(slow.met)

    assert run(engine, work) == 3


def test_a_connection_that_waits_for_a_hello_is_closed_in_the_end(engine):
    async def work(replicated, ray):
        ray.replicas["c"] = LocalReplica(engine, "c")
        slow = Slow(ray.replicas["c"])
        replicated.listed(ray.addresses)
        await async_wait_until(lambda: slow.met)
        replicated.close()
        received = await asyncio.to_thread(slow.met[0].recv, 1)
        slow.go.set()
        await asyncio.to_thread(ray.replicas["c"].kill)
        return received

    assert run(engine, work) == b""


def test_a_replica_that_cannot_be_reached_is_named_once(engine, monkeypatch, caplog, dead_url):
    monkeypatch.setattr(replicas, "SLOWEST", 0.001)
    port, tried, connect = int(dead_url.rpartition(":")[2]), [], handshake.connect

    def trying(address, name, worker):
        if name == "c":
            tried.append(address)
        return connect(address, name, worker)

    monkeypatch.setattr(handshake, "connect", trying)

    async def work(replicated, ray):
        nowhere = Address("127.0.0.1", port, new_secret())
        replicated.listed(ray.addresses | {"c": nowhere})
        await async_wait_until(lambda: len(tried) > 2 * replicas.PATIENCE)
        replicated.listed(ray.addresses)
        await async_wait_until(lambda: "c" not in replicated._keeping)

    run(engine, work)
    (message,) = (each.getMessage() for each in caplog.records if "cannot be reached" in each.getMessage())
    assert message.startswith(f"replica c cannot be reached at 127.0.0.1:{port}: ") and "refused" in message


def test_places_on_a_replica_are_given_back_when_the_connection_breaks(engine, monkeypatch):
    """The replica gives them back, too, as it cannot know whether the worker still runs."""
    monkeypatch.setattr(places, "DELAY", 0.0)
    monkeypatch.setattr(places, "KEEP", 1000.0)

    async def work(replicated, ray):
        with paused_steps(free=3) as resume:
            answer = asyncio.ensure_future(collect(replicated, [PROMPT], GREEDY))
            await async_wait_until(lambda: ray.held["a"] == 1)
            resume.set()
            await answer
        assert ray.held["a"] == 1
        before = replicated._replicas["a"]
        before._link.transport.abort()
        await async_wait_until(lambda: replicated._replicas.get("a") not in (None, before))
        await async_wait_until(lambda: not replicated._places._tasks)
        assert ray.held["a"] == 0

    run(engine, work, count=1)


def test_what_other_workers_tell_is_no_error_before_a_replica_is_known_and_forgotten_with_it(engine):
    async def work(replicated, ray):
        told = {"worker": 1, "replica": "a", "keys": "", "requests": 3}
        early = ReplicatedEngine(ray.reserve)
        early.learn(told)
        replicated.learn(told)
        assert replicated._others
        replicated.listed({"b": ray.addresses["b"]})
        assert not replicated._others

    run(engine, work)


def test_a_question_is_asked_again_if_its_replica_is_lost(engine):
    async def work(replicated, ray):
        async def gone(question):
            raise EngineGone("the engine has stopped")

        first, second = replicated._replicas.values()
        first.ask = gone
        answer = await replicated.ask(State())
        second.ask = gone
        with pytest.raises(EngineGone, match="no replica of this model runs"):
            await replicated.ask(State())
        return answer

    assert '"running"' in run(engine, work)


def test_a_replica_that_is_no_longer_listed_ends_its_streams_but_gets_no_new_ones(engine):
    """It is drained, before Ray ends it."""

    async def work(replicated, ray):
        with paused_steps(free=4) as resume:
            source = replicated.stream([Prompt(PROMPT)], GREEDY)
            tokens = (await anext(source))[1].token_ids
            (name,) = homes(replicated)
            drained = ray.replicas.pop(name)
            replicated.listed(ray.addresses)
            other = asyncio.ensure_future(collect(replicated, [PROMPT], GREEDY))
            await async_wait_until(lambda: len(homes(replicated)) == 2)
            assert homes(replicated).count(name) == 1
            resume.set()
            async for _, delta in source:
                tokens = tokens + delta.token_ids
            await other
        await asyncio.to_thread(drained.kill)
        return tokens

    assert run(engine, work) == alone(engine).token_ids


def test_a_stranger_at_a_replicas_address_is_not_used(engine, monkeypatch):
    refused, accept = [], handshake.accept

    def accepting(*arguments):
        try:
            return accept(*arguments)
        except handshake.Stranger as stranger:
            refused.append(stranger)
            raise

    monkeypatch.setattr(handshake, "accept", accepting)

    async def work(replicated, ray):
        replicated.listed(ray.addresses | {"c": ray.addresses["a"]})  # the port passed to another replica
        await async_wait_until(lambda: len(refused) > 1)
        assert set(replicated._replicas) == {"a", "b"}
        replicated.listed(ray.addresses)
        await async_wait_until(lambda: set(replicated._keeping) == {"a", "b"})

    run(engine, work)


def test_a_shutdown_ends_what_runs(engine):
    async def work(replicated, ray):
        with paused_steps(free=4):
            source = replicated.stream([Prompt(PROMPT)], GREEDY)
            await anext(source)
            replicated.give_up()
            with pytest.raises(EngineError, match="the server is stopping"):
                async for _ in source:
                    pass
            with pytest.raises(EngineError, match="the server is stopping"):
                await collect(replicated, [PROMPT], GREEDY)

    run(engine, work)
