"""An engine whose model is divided between processes generates the tokens of one on one device. float64, gloo."""

import numpy as np
import pytest
import torch

import minillm
from minillm import LLM, SamplingParams
from minillm.errors import ConfigError
from minillm.model.loader import EMBEDDED
from minillm.speculation import every_draft_runs
from tests import models
from tests.engine.test_remote_executor import STREAMS, TIGHT, requests

from . import forked

DOUBLE = {"dtype": "float64"}
SMALL = {"max_num_seqs": 4, "num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 12, "max_model_len": 64}
PROMPTS = [[5, 6, 7] * 4, [11], [5, 6, 7] * 4 + [8], [*range(20, 50)], [9, 4]]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def two():
    with forked.ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    with forked.ranks(4) as ranks:
        yield ranks


def tokens(done):
    return [(each.token_ids, each.finish_reason, each.stop_reason) for each in done]


def scores(done):
    """Every log-probability of a request, by token."""
    places = [*(done.logprobs or []), *(place for place in done.prompt_logprobs or [] if place)]
    return {(i, token): value for i, place in enumerate(places) for token, value in place.items()}


def assert_the_same(ranks, place=None, prompts=PROMPTS, params=GREEDY, divided=(), **options):
    """divided: options of the engine with ranks alone."""
    options = SMALL | DOUBLE | options
    here = LLM(place, device="cpu", cpu_threads=1, **options)
    # How many drafts are worth their time depends on measured times.
    with every_draft_runs(), here as own, forked.engine(ranks, place, **options, **dict(divided)) as other:
        wanted, found = own.generate(prompts, params), other.generate(prompts, params)
        assert tokens(found) == tokens(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            assert scores(mine).keys() == scores(theirs).keys()
            np.testing.assert_allclose([*scores(mine).values()], [*scores(theirs).values()], atol=1e-6)
        # A pipeline divides the rows between steps, and its drafts come in others.
        if other.engine.config.speculate == "off" and other.engine.config.pipeline_parallel_size == 1:
            assert other.stats() == own.stats()
        own_facts, facts = own.engine.facts, other.engine.facts
        assert (facts.model, facts.num_blocks) == (own_facts.model, own_facts.num_blocks)
        other.engine.scheduler.check()
        return other.stats()


def test_two_ranks_generate_one_devices_tokens_with_all_options_of_sampling(two):
    stats = assert_the_same(two, None, *(each[:11] for each in requests()), **TIGHT)
    assert stats["preemptions"] > 0 and stats["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("speculate", ["ngram", pytest.param(str(EMBEDDED), marks=pytest.mark.proof)])
def test_two_ranks_check_drafts(two, speculate):
    """A draft model runs in the engine's own process."""
    prompts, params = requests()
    stats = assert_the_same(two, None, [prompt * 3 for prompt in prompts[:6]], params[:6], speculate=speculate)
    assert stats["drafts"] > 0


def test_two_ranks_read_embeddings(two):
    torch.manual_seed(1)
    drawn = torch.randn(20, 256)
    prompts = [{"prompt_embeds": drawn}, {"parts": [[5, 6], drawn[:9], [7]]}, {"prompt_embeds": drawn}, [5, 6, 7]]
    assert_the_same(two, None, prompts)


def test_two_ranks_run_streams(two):
    params = [SamplingParams(max_tokens=40, ignore_eos=True, seed=seed) for seed in (1, 2)]
    assert_the_same(two, None, [[9, 8, 7], [5] * 20], params, **STREAMS)


SIMULATED = [pytest.param(name, marks=pytest.mark.proof) for name in ("nvfp4", "mxfp4", "sparse24", "pruned")]


@pytest.mark.parametrize("quantization", ["int8", "int4", *SIMULATED])
def test_two_ranks_share_quantized_weights(two, quantization):
    assert_the_same(two, None, PROMPTS[:2], quantization=quantization, kv_cache_dtype="int8")


NAMES = ["llama3-tied-head-dim", "gemma2-grouped-untied", "qwen3-sliding-tied"]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_share_a_model_of_another_family(two, name, tmp_path):
    models.make(name).save_pretrained(tmp_path)
    assert_the_same(two, tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", models.CONFIGS)
def test_four_ranks_share_every_family_in_every_format(four, name, quantization, tmp_path):
    models.make(name).save_pretrained(tmp_path)
    assert_the_same(four, tmp_path, quantization=quantization, num_blocks=72)


@pytest.mark.proof
@pytest.mark.parametrize("name", models.CONFIGS)
def test_two_ranks_share_every_family(two, name, tmp_path):
    models.make(name).save_pretrained(tmp_path)
    assert_the_same(two, tmp_path, num_blocks=72)


def test_what_ranks_cannot_do_is_refused_in_a_sentence(two):
    """And the next request runs."""
    with pytest.raises(ConfigError, match=r"^3 GPUs cannot share this model evenly: num_heads=4, vocab_size=4096"):
        LLM(device="cpu", tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="plan and tensor_parallel_size=2 exclude each other"):
        LLM(tensor_parallel_size=2, plan="plan.json")
    with forked.engine(two, num_blocks=16) as llm:
        with minillm.using(policy=minillm.scheduler.policies.ShortestPromptFirst) as used:
            (done,) = llm.generate([[5, 6]], GREEDY)
        assert len(done.token_ids) == 12 and used.calls["policy"] > 0
