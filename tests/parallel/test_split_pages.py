"""Ranks with the same KV head that divide its cache blocks generate the tokens of one device. float64, gloo."""

import pytest

from minillm import LLM, SamplingParams, ops
from minillm.errors import ConfigError
from minillm.model.loader import EMBEDDED
from minillm.ops.split_keys import FUSED
from tests import models, peft_files
from tests.engine.test_remote_executor import STREAMS, TIGHT, requests
from tests.parallel import forked
from tests.parallel.test_tensor_parallel import PROMPTS, assert_the_same

BETWEEN_TWO, BETWEEN_FOUR = ({"decode_context_parallel_size": ranks} for ranks in (2, 4))


@pytest.fixture(scope="module")
def two():
    with forked.ranks(2, plant=forked.little_memory) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    with forked.ranks(4) as ranks:
        yield ranks


@pytest.mark.proof
def test_two_ranks_generate_one_devices_tokens_with_all_options_of_sampling(two):
    stats = assert_the_same(two, None, *(each[:11] for each in requests()), divided=BETWEEN_TWO, **TIGHT)
    assert stats["preemptions"] > 0 and stats["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("speculate", ["ngram", pytest.param(str(EMBEDDED), marks=pytest.mark.proof)])
def test_drafts_are_checked(two, speculate):
    prompts, params = requests()
    repeated = [prompt * 3 for prompt in prompts[:6]]
    stats = assert_the_same(two, None, repeated, params[:6], divided=BETWEEN_TWO, speculate=speculate)
    assert stats["drafts"] > 0


def test_streams_move_their_blocks(two):
    params = [SamplingParams(max_tokens=40, ignore_eos=True, seed=seed) for seed in (1, 2)]
    assert_the_same(two, None, [[9, 8, 7], [5] * 20], params, divided=BETWEEN_TWO, **STREAMS)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.proof)])
def test_codes_are_divided_with_their_scales(two, kv_cache_dtype):
    """Codes and scales are those of one device; sums in float32 differ in their order, so tokens are compared alone."""
    assert_the_same(two, None, PROMPTS[:3], divided=BETWEEN_TWO, kv_cache_dtype=kv_cache_dtype)


def test_requests_have_adapters(two, tmp_path):
    models.make("gemma-multi-query").save_pretrained(tmp_path / "model")
    adapters = peft_files.several(tmp_path / "adapters", tmp_path / "model", 2)
    options = {"dtype": "float64", "num_blocks": 16, "adapters": adapters}
    params, names = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True), [None, *adapters]
    found = []
    for llm in (
        LLM(tmp_path / "model", device="cpu", **options),
        forked.engine(two, tmp_path / "model", **(options | BETWEEN_TWO)),
    ):
        with llm as engine:
            found.append([each.token_ids for each in engine.generate([[7, 8, 9]] * 3, params, adapter=names)])
    assert found[0] == found[1] and len({*map(tuple, found[0])}) == 3


def test_windows_free_blocks(two, tmp_path):
    models.make("gemma2-multi-query", sliding_window=6).save_pretrained(tmp_path)
    assert_the_same(two, tmp_path, divided=BETWEEN_TWO)


def test_only_ranks_with_the_same_head_divide_its_blocks(four, tmp_path):
    """Two KV heads on four ranks."""
    models.make("qwen3-grouped").save_pretrained(tmp_path)
    assert_the_same(four, tmp_path, divided=BETWEEN_TWO)


@pytest.mark.proof
def test_the_ranks_of_each_stage_divide_its_blocks(four):
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(device="cpu", num_blocks=24, dtype="float64") as own:
        wanted = [each.token_ids for each in own.generate(PROMPTS, params)]
    with forked.engine(four, num_blocks=24, dtype="float64", pipeline_parallel_size=2, **BETWEEN_TWO) as llm:
        assert [each.token_ids for each in llm.generate(PROMPTS, params)] == wanted


@pytest.mark.proof
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", [name for name in models.CONFIGS if models.CONFIGS[name].num_key_value_heads < 4])
def test_four_ranks_share_every_family(four, name, kv_cache_dtype, tmp_path):
    heads, window = models.CONFIGS[name].num_key_value_heads, getattr(models.CONFIGS[name], "sliding_window", None)
    models.make(name, **({"sliding_window": 8} if window else {})).save_pretrained(tmp_path)
    divided = BETWEEN_FOUR if heads == 1 else BETWEEN_TWO
    assert_the_same(four, tmp_path, divided=divided, num_blocks=72, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.proof
def test_four_ranks_generate_one_devices_tokens_with_all_options_of_sampling(four):
    assert_the_same(four, None, *requests(), divided=BETWEEN_FOUR, **TIGHT)


def test_the_cache_holds_as_many_times_the_tokens_as_there_are_ranks(two):
    """And a request may be as much longer."""
    facts = []
    for divided in ({}, BETWEEN_TWO):
        with forked.engine(two, **divided) as llm:
            facts.append(llm.engine.facts)
            prompt = [7] * (facts[-1].max_model_len - 5)
            (done,) = llm.generate([prompt], SamplingParams(max_tokens=5, ignore_eos=True))
            assert done.finish_reason == "length"
    one, other = facts
    assert other.num_blocks == 2 * one.num_blocks and other.max_model_len == 2 * one.max_model_len == 160


def with_kernels(rank: int) -> None:
    from minillm.ops import triton

    ops.on("cpu").fused |= {name: getattr(triton, name) for name in FUSED}


@pytest.mark.proof  # they are interpreted
def test_kernels_attend_and_merge_in_an_engine():
    pytest.importorskip("triton", reason="triton is not installed here")
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with forked.ranks(2, plant=with_kernels) as ranks:
        assert_the_same(ranks, None, PROMPTS[:2], params, divided=BETWEEN_TWO, dtype="float32")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tensor_parallel_size": 1}, "decode_context_parallel_size=2 must divide tensor_parallel_size=1"),
        ({"tensor_parallel_size": 2, "block_size": 7}, "block_size=7 cannot be .* block_size=8 would work"),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused(options, why):
    with pytest.raises(ConfigError, match=why):
        LLM(device="cpu", decode_context_parallel_size=2, **options)


@pytest.mark.parametrize(
    ("name", "ranks", "split", "why"),
    [
        ("gemma-multi-head-untied", 4, 2, "has 1 for each of this model's 4: leave it out"),
        ("gemma-grouped", 4, 4, "=4 needs as many ranks .* has 2 for each of this model's 2: 2 would work"),
        ("gemma2-multi-query", 2, 2, "sliding windows of a multiple of 2 tokens, and this model has 7: leave it out"),
    ],
)
def test_models_whose_blocks_cannot_be_divided_are_refused(name, ranks, split, why, tmp_path):
    models.make(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=why):
        LLM(tmp_path, device="cpu", tensor_parallel_size=ranks, decode_context_parallel_size=split)
