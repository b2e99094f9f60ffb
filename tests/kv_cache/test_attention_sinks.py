"""Streams: requests longer than the context, in constant memory, compared with a loop that follows the definition."""

import itertools

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import ConfigError, InvalidRequest
from minillm.kv_cache.attention_sinks import STREAM_TOKENS
from minillm.trace import Trace, tables
from tests import models
from tests.rounded_cache import rounded

BLOCK, SINKS, WINDOW = 4, 3, 9  # tokens; 1 block and 3 blocks
OPTIONS = {
    "attention_sinks": SINKS,
    "attention_window": WINDOW,
    "block_size": BLOCK,
    "max_model_len": 24,
    "dtype": "float64",
    "device": "cpu",
}
FAMILIES = ("gemma-multi-query", "llama3-grouped")
PROMPTS = [[7 * i % 90 + 1 for i in range(n)] for n in (1, 5, 20, 21, 37, 70)]
LENGTH = 60  # output tokens: every request exceeds the context of 24


def naive_stream(model, prompt: list[int], count: int, cached=lambda x: x) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities, one token at a time through transformers' layers.

    The token at position p sees the tokens in the sinks' blocks and in the window's blocks up to its own. Keys are
    cached unrotated; they and the query are rotated by their rank among the visible tokens. cached: keys or values ->
    what the cache gives back.
    """
    config, decoder = model.config, model.model
    sinks, window = -(-SINKS // BLOCK), -(-WINDOW // BLOCK)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = decoder.layers[0].self_attn.head_dim
    kept = [[] for _ in decoder.layers]  # (key, value) of each token
    tokens, found, logprobs = list(prompt), [], []
    for p in itertools.count():
        seen = [j for j in range(p + 1) if j // BLOCK < sinks or j // BLOCK >= p // BLOCK - window]
        places = torch.arange(len(seen))[None]
        x = decoder.embed_tokens(torch.tensor([[tokens[p]]]))
        if config.model_type == "gemma" and not hasattr(decoder.embed_tokens, "embed_scale"):
            x = x * config.hidden_size**0.5
        cos, sin = (part[0] for part in decoder.rotary_emb(x, places))

        def rotate(vectors, cos, sin):  # [places, heads, dim]
            first, second = vectors.chunk(2, -1)
            return vectors * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

        for layer, cache in zip(decoder.layers, kept, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            q = attention.q_proj(normed).view(1, heads, dim)
            new = (attention.k_proj(normed).view(kv_heads, dim), attention.v_proj(normed).view(kv_heads, dim))
            cache.append(tuple(map(cached, new)))
            k, v = (torch.stack([cache[j][part] for j in seen]) for part in (0, 1))
            q, k = rotate(q, cos[-1:], sin[-1:])[0], rotate(k, cos, sin)
            k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
            weights = (torch.einsum("hd,khd->hk", q, k) * dim**-0.5).softmax(-1)
            x = x + attention.o_proj(torch.einsum("hk,khd->hd", weights, v).reshape(1, 1, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        if p + 1 < len(tokens):
            continue
        scores = model.lm_head(decoder.norm(x))[0, 0].log_softmax(-1)
        tokens.append(int(scores.argmax()))
        found.append(tokens[-1])
        logprobs.append(scores.max().item())
        if len(found) == count:
            return found, logprobs


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A model's directory and the expected continuation of each prompt."""
    path = tmp_path_factory.mktemp(request.param)
    made = models.make(request.param)
    made.save_pretrained(path)
    with torch.no_grad():
        return path, [naive_stream(made.double(), prompt, LENGTH) for prompt in PROMPTS]


def generate(path, prompts=PROMPTS, **options):
    with LLM(path, **OPTIONS | options) as llm:
        params = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True, logprobs=1)
        done = llm.generate(prompts, params)
        llm.engine.scheduler.check()
        return done, llm.stats()


SCHEDULES = {
    "one token a step": {"max_num_batched_tokens": 1},
    "chunks of 3": {"max_num_batched_tokens": 3, "run_ahead": 0},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "as much as fits": {"max_num_batched_tokens": 512},
    "far ahead": {"run_ahead": 4},
    "a row at a time": {"max_num_seqs": 1, "num_blocks": 5},
    "preempted": {"num_blocks": 13, "max_num_batched_tokens": 9},
    "nothing shared": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_a_stream_equals_its_definition_under_any_schedule(options, family):
    path, expected = family
    done, stats = generate(path, **options)
    for completion, (tokens, logprobs) in zip(done, expected, strict=True):
        assert completion.token_ids == tokens
        got = [entry[token] for entry, token in zip(completion.logprobs, tokens, strict=True)]
        assert got == pytest.approx(logprobs, abs=1e-5)
    assert stats["blocks_available"] == stats["blocks"]
    assert stats["preemptions"] or options != SCHEDULES["preempted"], "no request was preempted"


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_stream_in_a_quantized_cache_equals_its_definition(name, family):
    """Codes are those of unrotated keys; attention rotates what they stand for."""
    path, _ = family
    model = models.reference(path, dtype=torch.float64)
    with torch.no_grad():
        expected = [naive_stream(model, each, LENGTH, lambda x: rounded(x, name))[0] for each in PROMPTS[1:3]]
    for options in ({"max_num_batched_tokens": 7}, {"num_blocks": 8, "max_num_batched_tokens": 9}):
        done, _ = generate(path, PROMPTS[1:3], kv_cache_dtype=name, **options)
        assert [each.token_ids for each in done] == expected


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_stream_in_float32_is_close_to_its_definition(device, family):
    """As a prompt, in chunks, and generated up to the first near-tie."""
    path, expected = family
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with LLM(path, **OPTIONS | {"dtype": "float32", "device": device}) as llm:
            texts = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, expected, strict=True)]
            read = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
            params = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True, logprobs=1)
            written = llm.generate(PROMPTS, params)
    finally:
        torch.set_float32_matmul_precision(before)
    same = 0
    for prompt, done, again, (tokens, logprobs) in zip(PROMPTS, read, written, expected, strict=True):
        found = done.prompt_logprobs[len(prompt) :]
        got = [entry[token] for entry, token in zip(found, tokens, strict=True)]
        assert got == pytest.approx(logprobs, abs=1e-3)
        pairs = zip(again.token_ids, tokens, again.logprobs, logprobs, strict=True)
        for _, token, entry, logprob in itertools.takewhile(lambda each: each[0] == each[1], pairs):
            assert entry[token] == pytest.approx(logprob, abs=1e-3)
            same += 1
    assert same > 0.8 * LENGTH * len(PROMPTS)


def test_a_stream_shares_only_blocks_from_before_its_first_eviction(family):
    """The same prompt hits every block up to a full row; no request hits later blocks."""
    path, expected = family
    with LLM(path, **OPTIONS) as llm:
        params = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
        first, again = (llm.generate([PROMPTS[-1]], params)[0] for _ in range(2))
        assert first.token_ids == again.token_ids == expected[-1][0]
        room = 5  # blocks
        assert llm.stats()["prefix_hit_tokens"] == (room - 1) * BLOCK
        assert llm.stats()["blocks_cached"] <= room


def test_a_long_stream_holds_a_constant_number_of_blocks(family):
    path, _ = family
    trace = Trace()
    with LLM(path, trace=trace, run_ahead=2, num_blocks=40, **OPTIONS) as llm:
        llm.generate([PROMPTS[2]], SamplingParams(max_tokens=400, temperature=0, ignore_eos=True))
    held = [sum(block >= 0 for block in table) for step in tables(trace) for _, (table,) in step.rows.values()]
    used = [sum(n > 0 for n in step.holders) for step in tables(trace)]
    assert len(held) > 300 and set(held[20:]) <= {5}
    assert max(used) <= 6, "a freed block must wait for the steps in flight, but no longer"
    released = [event for event in trace.events if event["event"] == "release"]
    assert len(released) == (20 + 400 - 1 - 1) // BLOCK - 4 and all(len(event["blocks"]) == 1 for event in released)


def test_penalties_seeds_and_prompt_logprobs_include_evicted_tokens(family):
    """Sampling depends on the request's positions and tokens, not on places in the cache."""
    path, expected = family
    params = [
        SamplingParams(max_tokens=50, temperature=1.0, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=50, temperature=0, repetition_penalty=1.4, ignore_eos=True),
        SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0),
    ]
    prompts = [PROMPTS[3], PROMPTS[1], PROMPTS[0] + expected[0][0]]
    with LLM(path, **OPTIONS) as llm:
        together = llm.generate(prompts, params)
        alone = [llm.generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    for a, b in zip(together, alone, strict=True):
        assert a.token_ids == b.token_ids
    assert len(set(together[1].token_ids)) > 20, "the penalty forgot evicted tokens"
    found = [entry[token] for entry, token in zip(alone[2].prompt_logprobs[1:], expected[0][0], strict=True)]
    assert found == pytest.approx(expected[0][1], abs=1e-5)


def test_a_prompt_longer_than_the_context_runs_and_one_over_the_stream_limit_is_rejected(family):
    path, _ = family
    with LLM(path, **OPTIONS) as llm:
        done = llm.generate([[5] * 300], SamplingParams(max_tokens=3, ignore_eos=True))[0]
        assert len(done.token_ids) == 3 and done.finish_reason == "length"
        with pytest.raises(InvalidRequest, match=f"a stream's limit = {STREAM_TOKENS} tokens"):
            llm.generate([[5] * STREAM_TOKENS])
    plain = OPTIONS | {"attention_sinks": None, "attention_window": None}
    with LLM(path, **plain) as llm, pytest.raises(InvalidRequest, match="max_model_len = 24 tokens"):
        llm.generate([[5] * 24])


def test_row_capacity_grows_with_the_longest_stream(family):
    path, _ = family
    with LLM(path, **OPTIONS) as llm:
        runner, scheduler = llm.engine.executor.runner, llm.engine.scheduler
        assert runner.state.tokens.shape[1] == scheduler.tokens.shape[1] == 25
        llm.generate([[1]], SamplingParams(max_tokens=STREAM_TOKENS - 1, stop_token_ids=range(1, 96), min_tokens=200))
        assert runner.state.tokens.shape[1] == scheduler.tokens.shape[1] == 400


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_window": None}, "go together"),
        ({"attention_sinks": None}, "go together"),
        ({"attention_sinks": -1}, "attention_sinks must be a whole number from 0"),
        ({"attention_window": 0}, "attention_window must be a whole number from 1"),
        ({"attention_window": 17}, "7 blocks of 4 tokens.*more than max_model_len=24; attention_window=16 would fit"),
        ({"attention_sinks": 24}, "lower attention_sinks"),
    ],
)
def test_invalid_stream_options_are_rejected_with_a_remedy(options, message, tmp_path):
    models.make("gemma-grouped").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        LLM(tmp_path, **OPTIONS | options)


def test_a_model_with_sliding_windows_is_rejected(tmp_path):
    models.make("gemma2-multi-query").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="layers with a sliding window"):
        LLM(tmp_path, **OPTIONS)
