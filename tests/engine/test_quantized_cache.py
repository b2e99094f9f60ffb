"""The engine with a cache in int8 and fp8: transformers' tokens with rounded keys and values, memory, accuracy."""

import itertools

import pytest
import torch

from minillm import LLM, SamplingParams, evaluate
from minillm.advice import sizing
from minillm.errors import ConfigError
from minillm.kv_cache.layer_groups import blocks_held
from minillm.model import Model
from minillm.model.config import PRESETS, ModelConfig
from tests import models
from tests.proofs import only_in_proofs
from tests.rounded_cache import rounding_transformers

NAMES = [
    "gemma-multi-query",
    "llama3-grouped",
    "gemma2-multi-query",  # soft caps and windows
    "gemma3-grouped-scaled",
    "gemma3-multi-head-untied",  # head_dim 12
    "mistral-grouped",
    "qwen3-sliding-tied",
]
COUNT = 20
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, logprobs=1)
PROMPTS = [[(7 * i + 5 * n) % 90 + 1 for i in range(n)] for n in (1, 4, 7, 8, 16, 21, 40)]
PROMPTS += [PROMPTS[-1][:32] + PROMPTS[-2]]
WAYS = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 5, "max_num_seqs": 3},
    "preempted": {"tight": True, "block_size": 4, "run_ahead": 2, "max_num_batched_tokens": 24},
    "prefix hits": {"one_by_one": True, "block_size": 4},
}


directory = models.directories(NAMES)


@pytest.fixture(scope="module")
def expected(directory):
    """For each format, transformers' greedy tokens and their log-probabilities, without a cache of its own."""
    model, found = models.reference(directory, dtype=torch.float64), {}
    for name in ("int8", "fp8"):
        likely = [each.token_ids for each in run(directory, name)]
        with rounding_transformers(name) as rounding, torch.inference_mode():
            models.keep_float64(rounding.patch)
            found[name] = [_greedy(model, *each) for each in zip(PROMPTS, likely, strict=True)]
    return found


def _greedy(model, prompt, likely) -> tuple[list[int], list[float]]:
    """likely: the tokens, if the model has each of them after those before: one pass tells."""
    scores = model(torch.tensor([prompt + likely[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :].log_softmax(-1)
    if len(likely) == COUNT and scores.argmax(-1).tolist() == likely:
        return likely, scores.amax(-1).tolist()
    ids, logprobs = list(prompt), []
    for _ in range(COUNT):
        scores = model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
        ids.append(int(scores.argmax()))
        logprobs.append(scores.max().item())
    return ids[len(prompt) :], logprobs


def run(directory, name, tight=False, one_by_one=False, **options):
    if tight:
        windows = ModelConfig.from_directory(directory).groups().windows
        longest = max(map(len, PROMPTS)) + COUNT
        needed = blocks_held(longest, windows, options["block_size"], options["max_num_batched_tokens"])
        options["num_blocks"] = needed + 3 * len(windows)
    with LLM(directory, dtype="float64", device="cpu", kv_cache_dtype=name, **options) as llm:
        asked = PROMPTS if one_by_one else [PROMPTS]
        done = [each for prompt in asked for each in llm.generate(prompt, GREEDY)]
        llm.engine.scheduler.check()
        assert not tight or llm.stats()["preemptions"] > 0, "no request was preempted: the cache is too large"
        assert not one_by_one or llm.stats()["prefix_hit_tokens"] >= 32, "nothing was shared"
    return done


PAIRS = list(itertools.product(WAYS, ["int8", "fp8"]))
SHORT = [("batched", "int8"), ("chunked", "fp8"), ("preempted", "int8"), ("prefix hits", "fp8")]


@pytest.mark.parametrize("way, name", [*SHORT, *only_in_proofs(*(pair for pair in PAIRS if pair not in SHORT))])
def test_every_way_of_running_gives_the_tokens_of_transformers_with_rounded_keys_and_values(
    directory, expected, name, way
):
    for done, (tokens, logprobs) in zip(run(directory, name, **WAYS[way]), expected[name], strict=True):
        assert done.token_ids == tokens
        got = [entry[token] for entry, token in zip(done.logprobs, tokens, strict=True)]
        assert got == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_embedded_model_generates_with_each_cache_and_dtype(name, dtype):
    params = SamplingParams(max_tokens=16, temperature=0)
    with LLM(device="cpu", dtype=dtype, kv_cache_dtype=name, num_blocks=64) as llm:
        caches = llm.engine.executor.runner.caches
        assert {cache.k.dtype for cache in caches} == {torch.int8 if name == "int8" else torch.float8_e4m3fn}
        found = llm.generate("Once upon a time", params)[0].text
    assert len(found) > 20


@pytest.fixture(scope="module")
def perplexities():
    found = {}
    for name in ("auto", "int8", "fp8"):
        with LLM(device="cpu", kv_cache_dtype=name) as llm:
            text = evaluate.load_text()[:12000]
            found[name] = evaluate.perplexity(llm, text, window=512)["perplexity"]
    return found


@pytest.mark.proof
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_perplexity_grows_by_at_most_a_hundredth(perplexities, name):
    assert 0.99 < perplexities[name] / perplexities["auto"] <= 1.01
    assert perplexities[name] != perplexities["auto"], "the cache is not quantized"


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_gemma_2b_has_room_for_nearly_twice_the_requests_scales_included(name):
    shape = PRESETS["gemma-2b"]
    fits = {
        kind: sizing.fit(shape, 141e9, 4096, kv_cache_dtype=kind, utilization=0.85).requests for kind in ("auto", name)
    }
    assert fits[name] >= 1.9 * fits["auto"]
    dense, small = (
        Model(shape, dtype=torch.bfloat16, device="meta", max_model_len=16, kv_cache_dtype=kind).cache_spec
        for kind in ("auto", name)
    )
    assert dense.bytes_per_token / small.bytes_per_token >= 1.9
    assert small.bytes_per_token * shape.num_layers == sizing.kv_bytes_per_token(shape, name)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_engine_has_more_blocks_in_the_same_memory(name, monkeypatch):
    monkeypatch.setattr("minillm.runner.memory.CPU_CACHE_BYTES", 1 << 20)
    blocks, taken = {}, {}
    for kind in ("auto", name):
        with LLM(device="cpu", dtype="bfloat16", kv_cache_dtype=kind) as llm:
            memory = llm.engine.executor.runner.memory
            blocks[kind] = llm.engine.executor.facts.num_blocks
            caches = llm.engine.executor.runner.caches
            parts = [part for cache in caches for part in (cache.k, cache.v, cache.k_scale, cache.v_scale)]
            taken[kind] = sum(part.nbytes for part in parts if part is not None)
            assert taken[kind] == blocks[kind] * memory.block_bytes
    head_dim = llm.model_config.head_dim
    assert taken[name] <= 1 << 20
    assert blocks[name] / blocks["auto"] == pytest.approx(2 * head_dim / (head_dim + 4), rel=0.02)


def test_an_unknown_format_names_the_choices():
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be one of auto, int8, fp8, not 'int4'"):
        LLM(kv_cache_dtype="int4")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be one of auto, int8, fp8, not 'half'"):
        Model(PRESETS["gemma-2b"], dtype=torch.bfloat16, device="meta", max_model_len=16, kv_cache_dtype="half")


def test_evaluation_says_which_cache_it_measured():
    with LLM(device="cpu", kv_cache_dtype="int8", num_blocks=256) as llm:
        row = next(evaluate.quality(llm, limit=2))
    assert row["kv_cache_dtype"] == "int8" and row["dtype"] == "float32"
