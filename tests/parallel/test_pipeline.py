"""An engine whose layers are divided between processes generates the tokens of one on one device. float64, gloo."""

import pytest

import minillm
from minillm import LLM, SamplingParams
from minillm.errors import ConfigError
from minillm.model.loader import EMBEDDED
from tests import models
from tests.engine.test_remote_executor import STREAMS, TIGHT, requests

from . import forked
from .test_tensor_parallel import GREEDY, PROMPTS, assert_the_same

STAGES = {"pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def two():
    with forked.ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    with forked.ranks(4) as ranks:
        yield ranks


def test_two_stages_generate_one_devices_tokens_with_all_options_of_sampling(two):
    stats = assert_the_same(two, None, *(each[:11] for each in requests()), divided=STAGES, **TIGHT)
    assert stats["preemptions"] > 0


def test_two_stages_of_two_ranks_generate_one_devices_tokens_and_find_prefixes(four):
    stats = assert_the_same(four, None, divided=STAGES)
    assert stats["prefix_hit_tokens"] > 0


def test_stages_check_drafts(two):
    prompts, params = requests()
    prompts, params = [prompt * 3 for prompt in prompts[:6]], params[:6]
    assert assert_the_same(two, None, prompts, params, speculate="ngram", divided=STAGES)["drafts"] > 0


def test_stages_have_quantized_weights_and_caches(two):
    assert_the_same(
        two, None, PROMPTS[:2], quantization="int4", quantized_head="int8", kv_cache_dtype="int8", divided=STAGES
    )


@pytest.mark.parametrize("name", ["gemma2-grouped-untied", pytest.param("llama-biases", marks=pytest.mark.proof)])
def test_stages_of_another_family(two, name, tmp_path):
    """The layers of a window and those without one are not the same ones in each stage, or as many."""
    models.make(name).save_pretrained(tmp_path)
    assert_the_same(two, tmp_path, num_blocks=72, divided=STAGES)


@pytest.mark.proof
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", models.CONFIGS)
def test_two_stages_of_two_ranks_share_every_family_in_every_format(four, name, quantization, tmp_path):
    models.make(name).save_pretrained(tmp_path)
    assert_the_same(four, tmp_path, quantization=quantization, num_blocks=72, divided=STAGES)


@pytest.mark.proof
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", models.CONFIGS)
def test_stages_share_every_family(name, stages, tmp_path):
    models.make(name).save_pretrained(tmp_path)
    with forked.ranks(stages) as ranks:
        assert_the_same(ranks, tmp_path, num_blocks=72, divided={"pipeline_parallel_size": stages})


@pytest.mark.proof
@pytest.mark.parametrize(
    "options", [{}, {"speculate": "ngram"}, {"speculate": str(EMBEDDED)}, {"run_ahead": 4}], ids=str
)
def test_two_stages_of_two_ranks_with_all_options_of_sampling(four, options):
    assert_the_same(four, None, *requests(), divided=STAGES, **TIGHT | options)


@pytest.mark.proof
@pytest.mark.parametrize("quantization", ["int8", "int4", "nvfp4", "mxfp4", "sparse24", "pruned"])
def test_stages_of_two_ranks_share_quantized_weights(four, quantization):
    assert_the_same(four, None, PROMPTS, quantization=quantization, kv_cache_dtype="int8", divided=STAGES)


def test_ranks_of_a_stage_divide_cache_blocks(four):
    assert_the_same(four, None, PROMPTS[:3], divided={"decode_context_parallel_size": 2, **STAGES})


def test_stages_run_streams(two):
    params = [SamplingParams(max_tokens=40, ignore_eos=True, seed=seed) for seed in (1, 2)]
    assert_the_same(two, None, [[9, 8, 7], [5] * 20], params, divided=STAGES, **STREAMS)


def test_requests_that_follow_a_failure_get_their_own_tokens(two):
    """Steps that were given up yield tokens too, of rows that others have by then."""

    class Failing(minillm.scheduler.policies.FirstComeFirstServed):
        shares = 0

        def share(self, pending, budget):
            self.shares += 1
            return super().share(pending, budget) if self.shares < 5 else 1 / 0

    small = {"num_blocks": 24, "max_num_seqs": 2, "max_num_batched_tokens": 6, "block_size": 4, "max_model_len": 64}
    with LLM(device="cpu", cpu_threads=1, **small) as own, forked.engine(two, **small, **STAGES) as llm:
        with minillm.using(policy=Failing), pytest.raises(ZeroDivisionError):
            llm.generate([[7, 8], [9]], GREEDY)
        prompts = [[*range(60, 90)], [*range(30, 55)]]
        assert [d.token_ids for d in llm.generate(prompts, GREEDY)] == [
            d.token_ids for d in own.generate(prompts, GREEDY)
        ]


def test_what_stages_cannot_do_is_refused_in_a_sentence(two):
    refused = pytest.raises(ConfigError, match=r"^pipeline_parallel_size=99: this model has \d+ layers, and each stage")
    with refused:
        LLM(device="cpu", pipeline_parallel_size=99)
    with pytest.raises(ConfigError, match="plan and pipeline_parallel_size=2 exclude each other"):
        LLM(pipeline_parallel_size=2, plan="plan.json")


def test_functions_of_a_users_run_in_the_stages_that_call_them(two):
    def embedding(ids, weight, scale):
        return weight[ids] * scale

    def lm_head(hidden, weight, soft_cap=None):
        return hidden @ weight.dequantize().T

    with forked.engine(two, num_blocks=16, **STAGES) as llm:
        wanted = llm.generate([[5, 6]], GREEDY)
        with minillm.using(embedding=embedding, lm_head=lm_head) as used:
            found = llm.generate([[5, 6]], GREEDY)
        assert found[0].token_ids == wanted[0].token_ids
        assert used.calls["embedding"] == used.calls["lm_head"] >= 12
