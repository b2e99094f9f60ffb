"""Logits that are not numbers, on a GPU: captured steps, compiled kernels and eight-bit formats end the request too."""

import math

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.request import NOT_NUMBERS
from tests.damaged import BAD, damaged_tiny_gemma, rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")

NAN, INF = math.nan, math.inf
GOOD = [[*row, *row, *row] for row in rows(6, 60, 4000)]
PROMPTS = [*GOOD[:3], [BAD, *GOOD[4]], [5, BAD], *GOOD[3:]]
FAILING = (3, 4)
WAYS = {
    "greedy": {"temperature": 0},
    "temperature": {"seed": 1},
    "top-p": {"seed": 2, "top_p": 0.9, "top_k": 20},
    "penalties": {"seed": 3, "repetition_penalty": 1.3},
    "log-probabilities": {"seed": 4, "logprobs": 2},
    "prompt log-probabilities": {"temperature": 0, "prompt_logprobs": 1},
}
OPTIONS = {
    "graphs": {},
    "kernel by kernel": {"enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 64},
    "far ahead": {"run_ahead": 3},
    "bfloat16": {"dtype": "bfloat16"},
    "float16 and a cache in fp8": {"dtype": "float16", "kv_cache_dtype": "fp8"},
    "a cache in int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "weights in int8": {"dtype": "bfloat16", "quantization": "int8", "quantized_head": "int8"},
    "weights and activations in int8": {"dtype": "bfloat16", "quantization": "w8a8"},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return damaged_tiny_gemma(tmp_path_factory.mktemp("damaged"))


@pytest.fixture(scope="module", params=OPTIONS)
def llm(request, directory):
    with LLM(directory, device="cuda", **({"dtype": "float32", "max_num_seqs": 16} | OPTIONS[request.param])) as llm:
        yield llm


def asked(way):
    return SamplingParams(**({"max_tokens": 24, "ignore_eos": True} | WAYS[way]))


@pytest.mark.parametrize("way", WAYS)
def test_only_the_requests_that_see_the_damaged_token_end(way, llm):
    before = llm.stats()["corrupted"]
    for _ in range(2):  # also in blocks that a failed request has freed
        found = llm.generate(PROMPTS, asked(way))
        for place, each in enumerate(found):
            if place in FAILING:
                assert (each.finish_reason, each.stop_reason, each.token_ids) == ("abort", NOT_NUMBERS, [])
            else:
                assert each.finish_reason == "length" and len(each.token_ids) == 24
    assert llm.stats()["corrupted"] == before + 4
    llm.engine.scheduler.check()


def test_alone_the_damaged_request_ends_and_the_next_one_does_not(llm):
    """One row has a fused step of its own."""
    for prompt in (PROMPTS[3], GOOD[0], PROMPTS[4], GOOD[0]):
        found = llm.generate([prompt], asked("greedy"))[0]
        assert found.finish_reason == ("abort" if BAD in prompt else "length")


def test_a_request_that_generates_the_damaged_token_ends_after_it(llm):
    likely = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0, min_tokens=1, logit_bias={BAD: 100})
    found = llm.generate([GOOD[0], GOOD[1]], likely)
    assert [each.token_ids for each in found] == [[BAD], [BAD]]
    assert {each.stop_reason for each in found} == {NOT_NUMBERS}


def test_the_tokens_of_the_others_do_not_change(directory):
    """In float32, where the likeliest tokens of these prompts are far enough apart for any batch."""
    with LLM(directory, device="cuda", dtype="float32", max_num_seqs=16, enable_prefix_caching=False) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0, logprobs=2)
        alone = [llm.generate([prompt], params)[0] for prompt in GOOD]
        found = llm.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True, temperature=0))
        for mine, right in zip(found[:3] + found[5:], alone, strict=True):
            for token, other, logprobs in zip(mine.token_ids, right.token_ids, right.logprobs, strict=True):
                first, second = sorted(logprobs.values(), reverse=True)[:2]
                if token != other:
                    assert first - second < 1e-3, "not a tie"
                    break


def test_prefixes_that_a_failed_request_shares_are_computed_again(directory):
    shared = GOOD[0][:64]
    prompts = [[*shared, BAD, *GOOD[1]], [*shared, 9], [*shared, 11]]
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0)
    with LLM(directory, device="cuda", dtype="float32") as llm:
        for _ in range(3):
            first, *others = llm.generate(prompts, params)
            assert first.stop_reason == NOT_NUMBERS
            assert {each.finish_reason for each in others} == {"length"}
        assert llm.stats()["corrupted"] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-30])
def test_the_sampling_kernel_gives_no_token_for_a_row_without_probabilities(temperature, dtype):
    from minillm.kernels.sampling import sample

    logits = torch.randn(9, 256_000, device="cuda").to(dtype)
    for row, (place, value) in enumerate([(0, NAN), (255_999, NAN), (4096, NAN), (17, INF), (4500, INF)]):
        logits[row, place] = value
    logits[5] = -INF
    logits[6] = NAN
    logits[7, 1:] = -INF
    uniform = torch.linspace(0, 0.99, 9, device="cuda")
    found = sample(logits, torch.full((9,), temperature, device="cuda"), uniform).tolist()
    assert found[:7] == [-1] * 7
    assert found[7] == 0 and 0 <= found[8] < 256_000


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_the_scale_of_a_row_with_nan_is_no_number(dtype):
    from minillm.kernels.quantized_inputs import quantize_rows

    x = torch.randn(3, 512, device="cuda")
    x[1, 300] = NAN
    _, scales = quantize_rows(x, dtype)
    assert scales.isfinite().flatten().tolist() == [True, False, True]
