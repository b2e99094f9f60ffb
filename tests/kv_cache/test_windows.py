"""Layers with a sliding window free the blocks that left it, and tokens still equal those of transformers."""

import random

import numpy as np
import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import InvalidRequest
from minillm.kv_cache.block_tables import BlockTables
from minillm.kv_cache.layer_groups import LayerGroups, blocks_held, longest_held
from minillm.model.config import ModelConfig
from minillm.ops.reference import visible
from minillm.request import Request
from minillm.runner import Runner
from minillm.scheduler import Scheduler
from tests import models
from tests.chance import SEED
from tests.emulated_graphs import emulated_graphs

pytestmark = pytest.mark.explore

NAMES = ["gemma2-multi-query", "gemma3-multi-query", "mistral-grouped"]
COUNT = 24
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)


# ---- which layers share a table


@pytest.mark.parametrize(
    "windows, groups, size, places",
    [
        ([None] * 18, (None,), 18, [(0, layer) for layer in range(18)]),  # Gemma, Llama
        ([4096] * 32, (4096,), 32, [(0, layer) for layer in range(32)]),  # Mistral
        ([4096, None] * 13, (4096, None), 13, [(layer % 2, layer // 2) for layer in range(26)]),  # Gemma 2
        ([8, 8, None, 8], (8, 8, 8, None), 1, [(0, 0), (1, 0), (3, 0), (2, 0)]),
    ],
    ids=["all global", "all local", "alternating", "one global layer"],
)
def test_layers_with_equal_windows_share_block_tables(windows, groups, size, places):
    assert LayerGroups.of(windows) == LayerGroups(groups, size, tuple(places))


def test_gemma_3_has_one_global_group_and_local_groups_of_the_same_size():
    windows = [512 if (layer + 1) % 6 else None for layer in range(26)]
    groups = LayerGroups.of(windows)
    assert groups.size == 4 and sorted(groups.windows, key=str) == [512] * 6 + [None]
    assert len(set(groups.of_layer)) == 26, "two layers share a cache"
    for layer, (group, place) in enumerate(groups.of_layer):
        assert groups.windows[group] == windows[layer] and 0 <= place < 4


def test_a_window_as_long_as_the_context_needs_no_group():
    config = ModelConfig(
        **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8),
        architecture="Gemma2ForCausalLM", num_layers=4, num_heads=1, num_kv_heads=1, head_dim=8, max_model_len=64,
        windows=(32, None, 32, None),
    )  # fmt: skip
    assert config.groups().windows == (32, None)
    assert config.groups(max_model_len=32).windows == (None,)


@pytest.mark.parametrize(
    "window, block_size, chunk", [(8, 4, 1), (7, 4, 1), (5, 3, 6), (1, 4, 1), (9, 1, 4), (6, 16, 5)]
)
def test_blocks_held_range_from_what_the_first_query_sees_to_what_the_last_writes(window, block_size, chunk):
    most = max((start + chunk - 1) // block_size - max(start - window + 1, 0) // block_size + 1 for start in range(200))
    assert blocks_held(1000, (window,), block_size, chunk) == most
    assert blocks_held(2, (window,), block_size, chunk) <= -(-2 // block_size)


@pytest.mark.parametrize("windows", [(None,), (None, 8), (None, 8, 20, None)], ids=str)
def test_the_longest_request_that_so_many_blocks_hold_is_the_last_that_fits(windows):
    for blocks in range(len(windows), 60):
        longest = longest_held(blocks, windows, 4, 3)
        assert longest % 4 == 0 and longest > 0
        assert blocks_held(longest, windows, 4, 3) <= blocks < blocks_held(longest + 1, windows, 4, 3)


# ---- engines


directory = models.directories(NAMES)


@pytest.fixture(scope="module")
def prompts():
    """Up to 15 windows long; some share a prefix, and one continues another."""
    rng = random.Random(SEED + 5)
    made = [[rng.randrange(1, 96) for _ in range(length)] for length in (3, 50, 70, 20)]
    return [*made, made[1][:36] + made[0], made[2] + made[3]]


def run(directory, prompts) -> list[list[int]]:
    with LLM(directory, dtype="float64", device="cpu", max_model_len=128, block_size=4, num_blocks=600) as llm:
        return [completion.token_ids for completion in llm.generate(prompts, GREEDY)]


@pytest.fixture(scope="module")
def expected(directory, prompts):
    return models.generated(directory, prompts, COUNT, run(directory, prompts))


@pytest.fixture
def poisoned(monkeypatch):
    """Before each step, fill blocks that no request holds or can find with NaN; returns their number each time."""
    engines, counts, own = [], [], Runner.run

    def run(runner, step):
        pool = engines[0].scheduler.pool
        free = [b for b in range(pool.num_blocks) if not pool.references[b] and b not in pool._key_of]
        counts.append(len(free))
        for cache in runner.caches:
            cache.k[free] = cache.v[free] = float("nan")
        return own(runner, step)

    monkeypatch.setattr(Runner, "run", run)
    return engines, counts


WAYS = {
    "batched": {"block_size": 4, "num_blocks": 600},
    "chunked": {"block_size": 2, "max_num_batched_tokens": 9, "run_ahead": 2, "num_blocks": 1500},
    "preempted": {"block_size": 4, "max_num_batched_tokens": 16, "run_ahead": 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_freeing_window_blocks_gives_the_tokens_of_transformers(directory, prompts, expected, way, poisoned):
    options = dict(WAYS[way])
    if way == "preempted":
        windows = ModelConfig.from_directory(directory).groups().windows
        options["num_blocks"] = blocks_held(128, windows, options["block_size"], options["max_num_batched_tokens"])
    engines, counts = poisoned
    with LLM(directory, dtype="float64", device="cpu", max_model_len=128, **options) as llm:
        engines.append(llm.engine)
        found = [completion.token_ids for completion in llm.generate(prompts, GREEDY)]
        llm.engine.scheduler.check()
        assert max(counts) > 0, "nothing was poisoned"
        # If most groups have a window, requests rarely grow beyond the blocks reserved at admission.
        assert llm.stats()["preemptions"] > 0 or way != "preempted" or "gemma2" not in str(directory)
        # Again, one at a time: these hit what the others left in the cache.
        hits = llm.stats()["prefix_hit_tokens"]
        found += [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
        assert llm.stats()["prefix_hit_tokens"] > hits or way == "preempted"
    assert found == expected * 2


def test_keeping_every_block_changes_no_token(directory, prompts, expected, monkeypatch):
    nothing = np.zeros(0, np.int32)
    monkeypatch.setattr(BlockTables, "expire", lambda tables, rows, computed: (nothing, nothing))
    assert run(directory, prompts) == expected


def test_decode_graphs_use_every_groups_block_table(tmp_path):
    """Emulated, in float32, with interpreted kernels."""
    pytest.importorskip("triton")
    models.make("gemma2-grouped-untied").save_pretrained(tmp_path)
    options = {"dtype": "float32", "device": "cpu", "block_size": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    options["max_num_seqs"] = 2
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    prompts = [[5, 9, 60], list(range(20, 44))]
    with LLM(tmp_path, **options) as llm:
        wanted = [completion.token_ids for completion in llm.generate(prompts, params)]
    with emulated_graphs(), LLM(tmp_path, **options) as llm:
        found = [completion.token_ids for completion in llm.generate(prompts, params)]
        graphs = llm.engine.executor.runner.graphs.captured
        decodes = sum(graph.graph.count for graph in graphs.decodes.values())
        mixed = sum(each.graph.count for each in graphs.mixed.values())
    assert found == wanted and decodes >= 7 and mixed == 2


# ---- blocks


def scheduler(windows, num_blocks=64, budget=16, **options) -> Scheduler:
    return Scheduler(
        max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=5000, block_size=4, num_blocks=num_blocks,
        windows=windows, **options,
    )  # fmt: skip


def request(name: str, tokens: int, output: int, first: int = 0) -> Request:
    prompt = np.arange(first, first + tokens, dtype=np.int32)
    return Request(name, prompt, SamplingParams(max_tokens=output), limit=tokens + output)


def finish(running: Scheduler, *launched) -> int:
    """Run to the end with one step in flight; returns the peak number of blocks held or awaiting release."""
    most, in_flight = 0, list(launched)
    while running.has_work or in_flight:
        step = running.schedule()
        if step is not None:
            in_flight.append(step)
        if in_flight and (len(in_flight) > 1 or step is None):
            read = in_flight.pop(0)
            running.complete(read, np.full(int(read.samples.sum()), 7))
        running.check()
        most = max(most, running.pool.num_blocks - running.pool.available)
    return most


def test_a_long_request_whose_layers_all_have_a_window_holds_as_many_blocks_as_a_short_one():
    held = []
    for tokens in (100, 1000, 4000):
        running = scheduler((32,))
        running.submit(request("a", tokens, 900))
        held.append(finish(running))
    assert held[0] == held[1] == held[2] <= blocks_held(4900, (32,), 4, 16) + 16 // 4


def test_a_request_longer_than_the_cache_runs_where_all_layers_have_a_window():
    running = scheduler((32,), num_blocks=blocks_held(4900, (32,), 4, 16))
    running.submit(request("a", 4000, 900))
    assert 0 < finish(running) <= running.pool.num_blocks and running.preemptions == 0


def test_a_request_whose_window_and_chunk_exceed_the_cache_is_rejected():
    needed = blocks_held(4900, (32,), 4, 16)
    running = scheduler((32,), num_blocks=needed - 1)
    with pytest.raises(InvalidRequest, match=f"4900 tokens of prompt and output need {needed} cache blocks of 4"):
        running.submit(request("a", 4000, 900))


def test_global_groups_keep_blocks_that_local_groups_free():
    running = scheduler((8, None))
    running.submit(request("a", 60, 2))
    for _ in range(4):
        step = running.schedule()
        running.complete(step, np.full(int(step.samples.sum()), 7))
    assert running.tables.held[:, 0].tolist() == [15, 15] and running.tables.gone[:, 0].tolist() == [13, 0]


def test_a_hit_needs_only_the_local_blocks_the_next_query_sees():
    running = scheduler((8, None), num_blocks=40)
    running.submit(request("a", 41, 2))
    finish(running)
    keys = running.pool._block_of
    cached = {group: [key for key in keys if key[-1] == group] for group in (0, 1)}
    assert len(cached[0]) == len(cached[1]) == 10, "freed blocks must stay in the prefix cache"
    # Another request evicts the oldest cached blocks: those that the local group freed first.
    running.pool.release(running.pool.allocate(running.pool.num_blocks - 14))
    left = {group: sum(key[-1] == group for key in keys) for group in (0, 1)}
    assert 2 <= left[0] < 10 and left[1] == 10, left
    running.submit(request("b", 41, 2))
    step = running.schedule()
    assert running.prefix_hits == 40 and step.starts.tolist() == [40]
    assert running.tables.gone[:, step.rows[0]].tolist() == [8, 0]
    finish(running, step)


def test_a_hit_ends_where_a_local_group_lacks_a_visible_block():
    running = scheduler((8, None), num_blocks=40)
    running.submit(request("a", 41, 2))
    finish(running)
    pool, second = running.pool, request("b", 41, 2)
    running.submit(second)
    running._find_prefix(second)
    block = pool._block_of.pop(second.keys[8] + b"\0")  # columns 8 and 9 are visible from token 40 on
    del pool._key_of[block], pool._cached[block]
    pool._free.append(block)
    step = running.schedule()
    assert running.prefix_hits == 32 and step.starts.tolist() == [32]
    finish(running, step)


@pytest.mark.parametrize("window", [1, 4, 7])
def test_hidden_blocks_are_those_of_which_attention_shows_no_key_to_the_next_query(window):
    block_size, longest = 4, 32
    tables = BlockTables(1, longest, block_size, (None, window), 16)
    for position in range(longest):
        seen = visible(torch.tensor([[position]]), longest, window)[0, 0].unflatten(0, (-1, block_size)).any(1)
        first = int(seen.nonzero()[0])
        assert tables.hidden(np.array([position]))[:, 0].tolist() == [0, first], position
