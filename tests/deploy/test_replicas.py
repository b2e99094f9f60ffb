"""An engine of replicas: requests follow their prefixes, and go on elsewhere when a replica is lost."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from minillm.deploy import replicas
from minillm.deploy.replicas import MOVES, joined
from minillm.request import RequestOptions, SamplingParams
from minillm.server.wire import Alive, Gauges, State
from minillm.server.worker.choice import Prompt
from minillm.server.worker.link import Busy, EngineError, EngineGone
from tests.deploy.stand_ins import LocalReplica, collect, connected, homes, local_replicas
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
        async def never(name):
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


def test_a_stranger_at_a_replicas_address_is_not_used(engine):
    async def work(replicated, ray):
        replicated.listed(ray.addresses | {"c": ray.addresses["a"]})  # the port passed to another replica
        await asyncio.sleep(0.1)
        assert set(replicated._replicas) == {"a", "b"}
        replicated.listed(ray.addresses)
        await async_wait_until(lambda: not replicated._reaching)

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
