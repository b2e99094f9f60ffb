"""A request with an adapter gets the tokens of the model into which that adapter is merged, whatever else runs."""

import random

import pytest
import torch

import minillm
from minillm import LLM, RequestOptions, SamplingParams
from minillm.errors import ConfigError
from minillm.request import Request
from minillm.runner.executor import WatchedExecutor
from tests import models, peft_files
from tests.proofs import only_in_proofs

FLOAT64 = {"dtype": "float64", "device": "cpu"}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
FAMILIES = ["gemma-multi-query", "gemma2-grouped-untied", "llama-biases", "qwen3-grouped"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    models.make("gemma-grouped").save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def adapters(directory, tmp_path_factory):
    return peft_files.several(tmp_path_factory.mktemp("adapters"), directory, 8)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts of which most share one of a few beginnings."""
    beginnings = [[rng.randrange(1, 96) for _ in range(24)] for _ in range(2)]
    return [
        rng.choice([[], *beginnings]) + [rng.randrange(1, 96) for _ in range(rng.randint(1, 9))] for _ in range(count)
    ]


def merged_tokens(adapter, model, place, wanted, params):
    """What the merged model generates for these prompts, each alone."""
    with LLM(peft_files.merge(adapter, model, place), max_num_seqs=1, enable_prefix_caching=False, **FLOAT64) as llm:
        return [each.token_ids for each in llm.generate(wanted, params)]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_and_each_kind_of_adapter_equals_its_merged_model(family, tmp_path):
    models.make(family).save_pretrained(tmp_path / "model")
    loaded = peft_files.several(tmp_path / "adapters", tmp_path / "model", 8)
    wanted = prompts(random.Random(1), 3)
    with LLM(tmp_path / "model", adapters=loaded, **FLOAT64) as llm:
        base = [each.token_ids for each in llm.generate(wanted, GREEDY)]
        found = {name: [each.token_ids for each in llm.generate(wanted, GREEDY, adapter=name)] for name in loaded}
        again = [each.token_ids for each in llm.generate(wanted, GREEDY)]
    assert again == base
    for i, (name, adapter) in enumerate(loaded.items()):
        assert found[name] == merged_tokens(adapter, tmp_path / "model", tmp_path / f"merged {i}", wanted, GREEDY), name
        assert found[name] != base


def test_several_adapters_and_the_base_run_in_one_batch(directory, adapters):
    names = [None, *adapters, None]
    with LLM(directory, adapters=adapters, **FLOAT64) as llm:
        wanted = [[7, 8, 9, 10]] * len(names)
        together = [each.token_ids for each in llm.generate(wanted, GREEDY, adapter=names)]
        assert llm.stats()["steps"] < 20
        alone = [llm.generate(wanted[0], GREEDY, adapter=name)[0].token_ids for name in names]
        (chosen,) = llm.generate(wanted[0], GREEDY, RequestOptions(adapter="adapter 3"))
    assert together == alone
    assert len({tuple(each) for each in together}) == len(names) - 1
    assert chosen.token_ids == together[4]


def random_requests(directory, adapters, merged, count, seed, **options):
    """Random requests over all adapters; asserts each one's tokens. Returns the engine's counts."""
    rng = random.Random(seed)
    wanted, names = prompts(rng, count), [rng.choice([None, *adapters]) for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 14), ignore_eos=True, seed=rng.randrange(99), temperature=rng.choice([0, 1])
        )
        for _ in range(count)
    ]
    expected = [None] * count
    for name in {*names}:
        mine = [i for i in range(count) if names[i] == name]
        with LLM(merged[name], max_num_seqs=1, enable_prefix_caching=False, **FLOAT64) as llm:
            done = llm.generate([wanted[i] for i in mine], [params[i] for i in mine])
        for i, each in zip(mine, done, strict=True):
            expected[i] = each.token_ids
    few = {"block_size": 4, "num_blocks": 26, "max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": 60}
    with LLM(directory, adapters=adapters, **FLOAT64 | few | options) as llm:
        found = [each.token_ids for each in llm.generate(wanted, params, adapter=names)]
        llm.engine.scheduler.check()
        stats = llm.stats()
    assert found == expected
    return stats


@pytest.fixture(scope="module")
def merged(directory, adapters, tmp_path_factory):
    place = tmp_path_factory.mktemp("merged")
    return {None: directory} | {
        name: peft_files.merge(each, directory, place / name) for name, each in adapters.items()
    }


@pytest.mark.parametrize(
    "options", [{"max_loras": 2}, *only_in_proofs({}, {"speculate": "ngram", "run_ahead": 0})], ids=str
)
def test_random_requests_get_the_tokens_of_merged_models(options, directory, adapters, merged):
    """With a tiny pool, shared prefixes, preemption, and two slots for eight adapters."""
    stats = random_requests(directory, adapters, merged, 40, 3, **options)
    assert stats["prefix_hit_tokens"] > 0
    assert stats["preemptions"] > 0


@pytest.mark.proof
def test_a_thousand_random_requests_get_the_tokens_of_merged_models(directory, adapters, merged):
    for seed, options in enumerate([{}, {"max_loras": 3}, {"max_loras": 1}, {"speculate": "ngram"}, {"run_ahead": 3}]):
        random_requests(directory, adapters, merged, 200, 10 + seed, **options)


# ---- what the cache may give to whom


def reload_under_one_name(directory, adapters, **options):
    """Run a prompt with one adapter, then with another one of the same name. Returns both outputs."""
    first, second = list(adapters.values())[:2]
    prompt, found = [5, 6, 7, 8] * 6, []
    with LLM(directory, adapters={"same": first}, max_lora_rank=8, block_size=4, **FLOAT64 | options) as llm:
        for other in (second, None):
            (done,) = llm.generate([prompt], GREEDY, adapter="same")
            found.append((done.token_ids, done.num_cached_tokens))
            llm.engine.unload_adapter("same")
            if other is not None:
                llm.engine.load_adapter("same", other)
    return found


def test_an_adapter_never_finds_what_another_one_of_its_name_has_cached(directory, adapters, merged):
    (one, _), (two, cached) = reload_under_one_name(directory, adapters)
    names = list(adapters)
    for name, tokens in zip(names, (one, two), strict=False):
        with LLM(merged[name], **FLOAT64) as llm:
            assert llm.generate([[5, 6, 7, 8] * 6], GREEDY)[0].token_ids == tokens
    assert cached == 0


def test_a_key_with_the_name_in_place_of_the_load_is_caught(directory, adapters, monkeypatch):
    """The bug that this guards against, planted: then the second adapter answers from the first one's cache."""
    monkeypatch.setattr(Request, "cache_key", property(lambda self: (self.options.cache_salt, self.options.adapter)))
    (_, _), (two, cached) = reload_under_one_name(directory, adapters)
    assert cached > 0
    monkeypatch.undo()
    assert reload_under_one_name(directory, adapters)[1][0] != two


def test_the_base_and_an_adapter_share_no_prefix_but_two_requests_of_one_do(directory, adapters):
    prompt = [3, 4] * 20
    with LLM(directory, adapters=adapters, block_size=4, **FLOAT64) as llm:
        order = (None, "adapter 0", "adapter 1", "adapter 0", None)
        cached = [llm.generate([prompt], GREEDY, adapter=name)[0].num_cached_tokens for name in order]
    assert cached == [0, 0, 0, 36, 36]


# ---- parts that a user may replace


def test_a_replaced_linear_still_gets_the_adapter_added(directory, adapters):
    """A learner's own `linear` knows nothing of adapters."""
    own = lambda x, weight: torch.nn.functional.linear(x, weight.dequantize(), weight.bias)  # noqa: E731
    with LLM(directory, adapters=adapters, **FLOAT64) as llm:
        expected = [each.token_ids for each in llm.generate([[7, 8]] * 2, GREEDY, adapter=["adapter 0", None])]
        with minillm.using(linear=own) as used:
            found = [each.token_ids for each in llm.generate([[7, 8]] * 2, GREEDY, adapter=["adapter 0", None])]
        assert used.calls["linear"] and found == expected
        with minillm.using(add_low_rank=lambda out, x, slots, factors: out) as used:
            without = [each.token_ids for each in llm.generate([[7, 8]] * 2, GREEDY, adapter=["adapter 0", None])]
    assert used.calls["add_low_rank"] and without == [expected[1]] * 2


def test_a_step_without_adapters_does_nothing_for_those_that_are_loaded(directory, adapters):
    with LLM(directory, adapters=adapters, **FLOAT64) as llm, minillm.using(add_low_rank=pytest.fail) as used:
        llm.generate([[7, 8, 9]] * 3, GREEDY)
    assert used.calls["add_low_rank"] == 0


# ---- slots


class CountedFills(WatchedExecutor):
    """Notes the adapter and the slot of each row that begins."""

    def __init__(self, executor):
        super().__init__(executor)
        self.rows = []

    def launch(self, step):
        self.rows += [new.adapter for new in step.new_rows]
        return super().launch(step)


def test_the_adapter_that_was_used_the_longest_time_ago_makes_room(directory, adapters):
    with LLM(directory, adapters=adapters, max_loras=2, **FLOAT64) as llm:
        watched = CountedFills(llm.engine.executor)
        with llm.engine.running_on(watched):
            for name in ("adapter 0", "adapter 1", "adapter 0", "adapter 2", "adapter 0", "adapter 1"):
                llm.generate([[7, 8]], GREEDY, adapter=name)
    assert watched.rows == [(1, 1), (2, 2), (1, 1), (3, 2), (1, 1), (2, 2)]


def test_a_request_waits_for_a_slot_and_those_behind_it_do_too(directory, adapters):
    with LLM(directory, adapters=adapters, max_loras=1, **FLOAT64) as llm:
        engine = llm.engine
        order = ["adapter 0", "adapter 1", "adapter 0"]
        for i, name in enumerate(order):
            engine.submit(engine.prepare([7, 8, 9], GREEDY, RequestOptions(adapter=name), request_id=str(i)))
        ended, most = [], 0
        while engine.has_work:
            ended += [each.request_id for each in engine.step()]
            most = max(most, len(engine.scheduler.order))
    assert ended == ["0", "1", "2"] and most == 1


# ---- other ways to run


def test_two_ranks_hold_their_parts_of_the_factors(directory, adapters):
    names = [None, *adapters]
    found = []
    for size in (1, 2):
        with LLM(directory, adapters=adapters, tensor_parallel_size=size, **FLOAT64) as llm:
            done = llm.generate([[5, 6, 7]] * len(names), GREEDY, adapter=names)
            found.append([each.token_ids for each in done])
            if size == 2:
                with pytest.raises(ConfigError, match="loads no adapters while it runs: name them when"):
                    llm.engine.load_adapter("late", adapters["adapter 0"])
    assert found[0] == found[1]
