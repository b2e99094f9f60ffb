"""For every model family: however a request is run, it gets transformers' tokens. float64, CPU."""

import random
from dataclasses import replace

import pytest

import minillm
from minillm import LLM, SamplingParams
from minillm.kv_cache.layer_groups import blocks_held
from minillm.model.config import ModelConfig
from tests import models
from tests.chance import SEED
from tests.proofs import only_in_proofs

pytestmark = pytest.mark.explore

NAMES = [
    "gemma2-multi-query",
    "gemma2-grouped-untied",
    "gemma3-multi-query",
    "gemma3-grouped-scaled",
    "mistral-grouped",
    "qwen2-sliding-tied",
    "qwen3-grouped",
    "qwen3-sliding-tied",
]
COUNT = 20
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
ALONE = {"run_ahead": 0, "enable_prefix_caching": False}


directory = models.directories(NAMES)


@pytest.fixture(scope="module")
def prompts():
    return draw_prompts(SEED)


def draw_prompts(seed: int) -> list[list[int]]:
    """Prompts shorter and longer than every window and than a block, two of them with a common prefix."""
    rng = random.Random(seed + 3)
    made = [[rng.randrange(1, 96) for _ in range(length)] for length in (1, 4, 7, 8, 16, 21, 40)]
    return [*made, made[-1][:32] + made[-2]]


@pytest.fixture(scope="module")
def expected(directory, prompts):
    """What transformers generates, one prompt at a time."""
    return models.generated(directory, prompts, COUNT, run(directory, prompts))


def run(directory, prompts, one_by_one=False, tight=False, **options) -> list[list[int]]:
    """tight: only a few blocks more than the longest request needs."""
    if tight:
        windows, longest = ModelConfig.from_directory(directory).groups().windows, max(map(len, prompts)) + COUNT
        needed = blocks_held(longest, windows, options["block_size"], options["max_num_batched_tokens"])
        options["num_blocks"] = needed + 3 * len(windows)
    with LLM(directory, dtype="float64", device="cpu", **options) as llm:
        asked = prompts if one_by_one else [prompts]
        found = [completion.token_ids for prompt in asked for completion in llm.generate(prompt, GREEDY)]
        llm.engine.scheduler.check()
        if "num_blocks" in options:
            assert llm.stats()["preemptions"] > 0, "no request was preempted: the cache is too large for this test"
        if one_by_one and options.get("enable_prefix_caching", True):
            assert llm.stats()["prefix_hit_tokens"] >= 32, "nothing was shared"
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"one_by_one": True, **ALONE},
        {},
        {"max_num_batched_tokens": 5, "max_num_seqs": 3},
        {"tight": True, "block_size": 4, "run_ahead": 2, "max_num_batched_tokens": 24},
        {"one_by_one": True, "block_size": 4},
        *only_in_proofs({"max_num_batched_tokens": 1}),
    ],
    ids=["alone", "batched", "chunked", "preempted", "prefix hits", "a token at a time"],
)
def test_every_way_of_running_gives_the_tokens_of_transformers(directory, prompts, expected, options):
    assert run(directory, prompts, **options) == expected


def test_the_reference_operations_give_the_tokens_of_transformers(directory, prompts, expected):
    reference = {name: getattr(minillm.ops.reference, name) for name in minillm.ops.names()}
    with minillm.using(**reference) as used:
        assert run(directory, prompts) == expected
    assert min(used.calls[name] for name in ("decode_attention", "prefill_attention", "lm_head")) > 0


@pytest.mark.parametrize("operation", ["decode_attention", "prefill_attention"])
def test_attention_without_its_window_changes_the_tokens(directory, operation):
    prompts = draw_prompts(seed=0)  # with other prompts, an operation's window may not affect any token
    own = getattr(minillm.ops.on("cpu"), operation)

    def far_sighted(*args):
        return own(*args[:-1], replace(args[-1], window=None))

    expected = run(directory, prompts)
    with minillm.using(**{operation: far_sighted}) as used:
        found = run(directory, prompts)
    assert used.calls[operation] > 0
    assert (found == expected) == ("qwen3-grouped" in str(directory)), (
        "removing the window must change tokens of a family with windows"
    )
