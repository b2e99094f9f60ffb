"""However a request is run, it gets the same tokens. Greedy, float64, CPU."""

import asyncio
import gc
import random

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM

import minillm
from minillm import LLM, AsyncLLM, InvalidRequest, RequestOptions, SamplingParams
from minillm.errors import ConfigError
from tests.chance import SEED
from tests.consistent import scheduler_is_consistent_after_every_step  # noqa: F401
from tests.waiting import TIMEOUT, async_wait_until, paused_steps

pytestmark = [pytest.mark.explore, pytest.mark.key]

VOCABULARY = 97


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A small random Gemma in which each token depends on every component and on all previous tokens."""
    torch.manual_seed(0)
    config = GemmaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=2,
    )
    model = GemmaForCausalLM(config).double()
    for name, parameter in model.named_parameters():
        scale = 0.05 if "embed" in name else 0.4
        torch.nn.init.normal_(parameter, std=scale)
    place = tmp_path_factory.mktemp("gemma")
    model.float().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(SEED + 1)
    return [[rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, 40))] for _ in range(12)]


GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def tokens(directory, prompts, params=GREEDY, **options):
    options = {"dtype": "float64", "device": "cpu", **options}
    with LLM(directory, **options) as llm:
        found = [completion.token_ids for completion in llm.generate(prompts, params)]
        llm.engine.scheduler.check()
        assert llm.stats()["blocks_available"] == llm.stats()["blocks"], "blocks leaked"
    return found


@pytest.fixture(scope="module")
def alone(directory, prompts):
    """Each request alone: unchunked, without run-ahead, without shared blocks."""
    with LLM(directory, dtype="float64", device="cpu", run_ahead=0, enable_prefix_caching=False) as llm:
        return [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]


def test_outputs_depend_on_every_previous_token(directory, prompts, alone):
    """Or the tests below would prove nothing: no output repeats itself, and changing its first token changes it."""
    assert all(len(set(output)) > 6 for output in alone)
    changed = [[(prompt[0] + 1) % VOCABULARY, *prompt[1:]] for prompt in prompts]
    assert all(a != b for a, b in zip(alone, tokens(directory, changed), strict=True))


def test_a_request_alone_equals_transformers(directory, prompts, alone):
    model = GemmaForCausalLM.from_pretrained(directory, dtype=torch.float64)
    for prompt, output in zip(prompts, alone, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        greedy = {"do_sample": False, "max_new_tokens": 24, "min_new_tokens": 24, "eos_token_id": None}
        expected = model.generate(ids, attention_mask=mask, **greedy)[0, len(prompt) :].tolist()
        assert output == expected


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 4])
def test_batching_and_run_ahead_change_no_token(directory, prompts, alone, run_ahead):
    assert tokens(directory, prompts, run_ahead=run_ahead) == alone


@pytest.mark.parametrize("budget", [1, 2, 5, 17, 64])
def test_chunking_at_any_budget_changes_no_token(directory, prompts, alone, budget):
    assert tokens(directory, prompts, max_num_batched_tokens=budget, max_num_seqs=5) == alone


@pytest.mark.parametrize("seed", [0, 1])
def test_arrival_order_changes_no_token(directory, prompts, alone, seed):
    order = random.Random(SEED + seed).sample(range(len(prompts)), len(prompts))
    found = tokens(directory, [prompts[i] for i in order], max_num_seqs=3)
    assert found == [alone[i] for i in order]


@pytest.mark.parametrize("blocks", [{"block_size": size, "num_blocks": -(-64 // size) + 2} for size in (1, 3, 16)])
def test_a_preempted_request_resumes_with_the_same_tokens(directory, prompts, alone, blocks):
    with LLM(directory, dtype="float64", device="cpu", run_ahead=2, **blocks) as llm:
        done = llm.generate(prompts, GREEDY)
        assert llm.stats()["preemptions"] > 0, "no request was preempted: the cache is too large for this test"
    assert [each.token_ids for each in done] == alone
    assert all(each.arrival_time <= each.scheduled_time <= each.first_token_time <= each.finish_time for each in done)


def test_prefix_cache_hits_change_no_token(directory, prompts, alone):
    with LLM(directory, dtype="float64", device="cpu", block_size=4) as llm:
        llm.generate(prompts, GREEDY)
        again = [completion.token_ids for completion in llm.generate(prompts, GREEDY)]
        assert llm.stats()["prefix_hit_tokens"] > sum(map(len, prompts)) / 2
    assert again == alone


def shared_beginnings(count: int = 24, prefix: int = 160, most: int = 16) -> list[list[int]]:
    rng = random.Random(SEED + 1)
    beginning = [rng.randrange(4, 90) for _ in range(prefix)]
    return [[*beginning, *(rng.randrange(4, 90) for _ in range(rng.randint(1, most)))] for _ in range(count)]


def computed_in_prefill(prompts, params=GREEDY, each=None, **options) -> tuple[int, list[list[int]]]:
    """The number of prefill tokens computed, and the outputs."""
    with LLM(device="cpu", max_num_batched_tokens=512, **options) as llm:
        found = llm.generate(prompts, params, each)
        return sum(map(len, prompts)) - llm.stats()["prefix_hit_tokens"], [each.token_ids for each in found]


def test_simultaneous_requests_compute_their_common_prefix_once():
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    prompts = shared_beginnings()
    shared, tokens_shared = computed_in_prefill(prompts, params)
    alone, tokens_alone = computed_in_prefill(prompts, params, enable_prefix_caching=False)
    assert alone == sum(map(len, prompts))
    assert shared == alone - 23 * 160 <= 0.2 * alone, "one request should compute the prefix for all"
    assert tokens_shared == tokens_alone


def test_salts_isolate_tenants_and_a_request_may_opt_out():
    prompts = shared_beginnings(count=4, prefix=64, most=8)
    params, total = SamplingParams(max_tokens=2, temperature=0), sum(map(len, prompts))
    assert computed_in_prefill(prompts, params)[0] == total - 3 * 64
    assert computed_in_prefill(prompts, params, RequestOptions(use_prefix_cache=False))[0] == total
    salted = [RequestOptions(cache_salt=salt) for salt in "aabb"]
    assert computed_in_prefill(prompts, params, salted)[0] == total - 2 * 64


def test_the_reference_operations_give_the_same_tokens(directory, prompts, alone):
    reference = {name: getattr(minillm.ops.reference, name) for name in minillm.ops.names()}
    with minillm.using(**reference) as used:
        assert tokens(directory, prompts) == alone
    assert min(used.calls[name] for name in ("decode_attention", "prefill_attention", "linear")) > 0


def test_zeroed_attention_changes_the_output(directory, prompts, alone):
    def zeros(q, *args, **kwargs):
        return torch.zeros_like(q)

    with minillm.using(decode_attention=zeros) as used:
        found = tokens(directory, prompts)
    assert used.calls["decode_attention"] > 0
    assert all(a != b for a, b in zip(found, alone, strict=True))


def test_shifted_positions_change_the_output(directory, prompts, alone):
    def shifted(q, k, cos_sin):
        return minillm.ops.reference.rotary_embedding(q, k, cos_sin.roll(1, dims=0))

    with minillm.using(rotary_embedding=shifted):
        found = tokens(directory, [prompt for prompt in prompts if len(prompt) > 4])
    assert all(
        a != b for a, b in zip(found, [o for p, o in zip(prompts, alone, strict=True) if len(p) > 4], strict=True)
    )


def test_a_dropped_layer_changes_the_output(directory, prompts, alone):
    with LLM(directory, dtype="float64", device="cpu") as llm:
        llm.engine.model.layers.pop(1)
        llm.engine.executor.runner.caches.pop()
        found = [completion.token_ids for completion in llm.generate(prompts, GREEDY)]
    assert all(a != b for a, b in zip(found, alone, strict=True))


def test_an_unsolved_exercise_falls_back_to_the_engines_implementation(directory, prompts, alone):
    def stub(*args, **kwargs):
        raise minillm.NotSolvedYet("write decode_attention")

    with minillm.using(decode_attention=stub) as used:
        assert tokens(directory, prompts) == alone
    assert used.calls["decode_attention"] == 0 and "decode_attention" in used.not_solved


def test_a_failing_override_leaves_the_engine_usable(directory, prompts, alone):
    def broken(*args, **kwargs):
        raise RuntimeError("an idea that did not work")

    with LLM(directory, dtype="float64", device="cpu") as llm:
        with minillm.using(rms_norm=broken), pytest.raises(RuntimeError, match="did not work"):
            llm.generate(prompts, GREEDY)
        llm.engine.scheduler.check()
        assert [completion.token_ids for completion in llm.generate(prompts, GREEDY)] == alone


def test_an_unknown_operation_is_reported_by_name(directory):
    with (
        pytest.raises(ValueError, match="no part is called 'attention'.*decode_attention"),
        minillm.using(attention=print),
    ):
        pass


def test_random_aborts_in_a_tiny_pool_change_no_other_requests_tokens(directory):
    rng = random.Random(SEED + 2)
    work = [([rng.randrange(2, 6) for _ in range(rng.randint(1, 30))], rng.randint(1, 20)) for _ in range(40)]
    with LLM(directory, dtype="float64", device="cpu", run_ahead=0, enable_prefix_caching=False) as llm:
        alone = [llm.generate(p, SamplingParams(max_tokens=n, temperature=0, ignore_eos=True))[0] for p, n in work]
    options = {"num_blocks": 30, "block_size": 4, "max_num_seqs": 7, "max_num_batched_tokens": 19, "run_ahead": 2}
    with LLM(directory, dtype="float64", device="cpu", **options) as llm:
        engine, batch = llm.engine, []
        while len(batch) < len(work) or engine.tracked:
            if len(batch) < len(work) and rng.random() < 0.5:
                prompt, count = work[len(batch)]
                params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
                batch.append(engine.prepare(prompt, params))
                engine.submit(batch[-1])
            if engine.tracked and rng.random() < 0.05:
                engine.abort(rng.choice(list(engine.tracked)))
            engine.step()
            engine.scheduler.check()
        reasons = set()
        for tracked, expected in zip(batch, alone, strict=True):
            found = tracked.completion
            reasons.add(found.finish_reason)
            assert found.token_ids == expected.token_ids[: len(found.token_ids)]
            assert found.finish_reason == "abort" or len(found.token_ids) == len(expected.token_ids)
        assert reasons == {"abort", "length"}
        while engine.in_flight:
            engine.step()
        assert llm.stats()["blocks_available"] == 30


# ---- the contents of a completion


@pytest.mark.parametrize("last", [False, True], ids=["early", "at max_tokens"])
def test_a_stop_token_ends_the_output_and_stays_in_it(directory, prompts, alone, last):
    stop = alone[0][5]
    most = alone[0].index(stop) + 1 if last else 24
    params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True, stop_token_ids=[stop])
    with LLM(directory, dtype="float64", device="cpu") as llm:
        completion = llm.generate(prompts[0], params)[0]
    assert completion.token_ids == alone[0][: alone[0].index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_the_models_end_token_ends_the_output_unless_ignored(directory, prompts):
    bias = {1: 100.0}
    with LLM(directory, device="cpu") as llm:
        ended, ignored, late = llm.generate(
            [prompts[0]] * 3,
            [
                SamplingParams(max_tokens=8, logit_bias=bias),
                SamplingParams(max_tokens=8, logit_bias=bias, ignore_eos=True),
                SamplingParams(max_tokens=8, min_tokens=5, logit_bias=bias),
            ],
        )
    assert (ended.token_ids, ended.finish_reason) == ([1], "stop")
    assert (ignored.token_ids, ignored.finish_reason) == ([1] * 8, "length")
    assert len(late.token_ids) == 6 and late.token_ids[-1] == 1 and 1 not in late.token_ids[:-1]


def test_logprobs_equal_those_of_transformers(directory, prompts):
    """For prompt tokens and generated tokens, whatever the chunks."""
    model = GemmaForCausalLM.from_pretrained(directory, dtype=torch.float64)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    with LLM(directory, dtype="float64", device="cpu", max_num_batched_tokens=7) as llm:
        completions = llm.generate(prompts[:5], params)
    for prompt, completion in zip(prompts, completions, strict=False):
        ids = torch.tensor([prompt + completion.token_ids])
        expected = model(ids).logits[0].log_softmax(-1)
        assert completion.prompt_logprobs[0] is None and len(completion.prompt_logprobs) == len(prompt)
        logprobs = completion.prompt_logprobs[1:] + completion.logprobs
        for position, found in enumerate(logprobs):
            token, k = int(ids[0, position + 1]), 2 if position + 1 < len(prompt) else 3
            assert set(found) == {token, *expected[position].topk(k).indices.tolist()}
            for other, value in found.items():
                assert value == pytest.approx(expected[position, other].item(), abs=1e-9)


def test_a_seeded_request_gets_the_same_tokens_in_any_batch(directory, prompts):
    params = SamplingParams(max_tokens=20, temperature=1.3, top_p=0.95, seed=5, ignore_eos=True, repetition_penalty=1.1)
    others = SamplingParams(max_tokens=13, temperature=0.7, ignore_eos=True)
    with LLM(directory, dtype="float64", device="cpu", run_ahead=0) as llm:
        expected = llm.generate(prompts[3], params)[0].token_ids
    options = {"num_blocks": 30, "block_size": 4, "run_ahead": 3, "max_num_batched_tokens": 9}
    with LLM(directory, dtype="float64", device="cpu", seed=1, **options) as llm:
        found = llm.generate(prompts, [others] * 3 + [params] + [others] * 8)[3].token_ids
    assert found == expected
    assert tokens(directory, [prompts[3]], SamplingParams(max_tokens=20, temperature=1.3, seed=6)) != [expected]


def test_unseeded_requests_differ_and_the_engines_seed_repeats_them(directory, prompts):
    params = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True)
    first, second = (tokens(directory, [prompts[0]] * 4, params, seed=3) for _ in range(2))
    assert first == second
    assert len({tuple(output) for output in first}) == 4
    assert tokens(directory, [prompts[0]] * 4, params, seed=4) != first


def test_text_needs_a_tokenizer(directory):
    with LLM(directory, device="cpu") as llm:
        with pytest.raises(InvalidRequest, match="no tokenizer files: give the prompt as a list of token ids"):
            llm.generate("hello")
        with pytest.raises(InvalidRequest, match="stop strings need a tokenizer"):
            llm.generate([5], SamplingParams(stop="x"))
        assert llm.generate([5], GREEDY)[0].text == ""


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([VOCABULARY], {}, f"token id {VOCABULARY} is outside the vocabulary: ids go from 0 to {VOCABULARY - 1}"),
        ([-1, 3], {}, "token id -1 is outside the vocabulary"),
        ([1.5], {}, "list of token ids"),
        ([[1], [[2]]], {}, "list of token ids"),
        ([3] * 256, {}, "max_model_len = 256"),
        ([3], {"stop_token_ids": [VOCABULARY]}, f"stop_token_ids names token {VOCABULARY}"),
        ([3], {"logit_bias": {VOCABULARY: 1.0}}, f"logit_bias names token {VOCABULARY}"),
    ],
)
def test_a_request_that_cannot_run_is_rejected_before_anything_runs(directory, prompt, params, message):
    with LLM(directory, device="cpu") as llm:
        with pytest.raises(InvalidRequest, match=message):
            llm.generate([prompt], SamplingParams(**params))
        assert llm.stats()["steps"] == 0
        assert len(llm.generate([[3, 4], [5]], GREEDY)) == 2, "the engine stays usable"


def test_an_invalid_prompt_among_many_is_identified(directory):
    with LLM(directory, device="cpu") as llm, pytest.raises(InvalidRequest, match="prompt 1: the prompt is empty"):
        llm.generate([[3], []])


def test_a_request_too_large_for_the_cache_is_rejected(directory):
    with (
        LLM(directory, device="cpu", num_blocks=2, block_size=4) as llm,
        pytest.raises(InvalidRequest, match="9 tokens of prompt and output need 3 cache blocks .* the cache has 2"),
    ):
        llm.generate([3, 4, 5], SamplingParams(max_tokens=6))


def test_outputs_end_at_max_model_len(directory):
    with LLM(directory, device="cpu", max_model_len=20) as llm:
        completion = llm.generate([3] * 15, SamplingParams(max_tokens=50, ignore_eos=True))[0]
    assert len(completion.token_ids) == 5 and completion.finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 4}, "max_num_seq.*the engine's options are: .*max_num_seqs"),
        ({"block_size": 0}, "block_size must be a whole number from 1, not 0"),
        ({"dtype": "int8"}, "dtype must be one of auto"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must be in \(0, 1\]"),
        ({"max_model_len": 100_000}, "max_model_len"),
    ],
)
def test_invalid_options_are_reported_by_name(directory, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(directory, **{"device": "cpu", **options})


def test_a_closed_engine_raises_a_clear_error_and_frees_its_memory(directory):
    llm = LLM(directory, device="cpu")
    weights = llm.engine.model.embedding
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([3])
    assert len(gc.get_referrers(weights)) <= 1, "something still references the model"
    llm.close()


# ---- the asynchronous engine


def test_streams_give_the_same_tokens(directory, prompts, alone):
    async def everything():
        llm = AsyncLLM(directory, dtype="float64", device="cpu", max_num_seqs=5)

        async def one(prompt):
            deltas = [delta async for delta in llm.stream(prompt, GREEDY)]
            assert deltas[-1].completion.token_ids == [t for delta in deltas for t in delta.token_ids]
            return deltas[-1].completion.token_ids

        found = await asyncio.gather(*(one(prompt) for prompt in prompts))
        llm.close()
        return found

    assert asyncio.run(everything()) == alone


def test_leaving_a_stream_frees_its_blocks_and_affects_no_other_request(directory, prompts, alone):
    async def everything():
        llm = AsyncLLM(directory, dtype="float64", device="cpu")
        staying = asyncio.create_task(llm.generate(prompts[0], GREEDY))
        stream = llm.stream(prompts[1], SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        completion = await staying
        await async_wait_until(lambda: llm.stats()["blocks_available"] == llm.stats()["blocks"])
        llm.close()
        return completion.token_ids

    assert asyncio.run(everything()) == alone[0]


def test_an_aborted_stream_ends(directory, prompts):
    async def everything():
        llm = AsyncLLM(directory, device="cpu")
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        with paused_steps() as resume:
            task = asyncio.create_task(llm.generate(prompts[0], params, request_id="mine"))
            await async_wait_until(lambda: llm.stats()["running"])
            llm.abort("mine")
            resume.set()
            completion = await asyncio.wait_for(task, TIMEOUT)
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            await llm.generate(prompts[0])
        return completion

    assert asyncio.run(everything()).finish_reason == "abort"


def test_closing_ends_every_stream(directory, prompts):
    async def everything():
        llm = AsyncLLM(directory, device="cpu")
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        with paused_steps() as resume:
            tasks = [asyncio.create_task(llm.generate(prompt, params)) for prompt in prompts]
            await async_wait_until(lambda: llm.stats()["running"])
            closing = asyncio.create_task(asyncio.to_thread(llm.close))
            await async_wait_until(lambda: not llm.alive)
            resume.set()
            await closing
        return await asyncio.wait_for(asyncio.gather(*tasks), TIMEOUT)

    assert {completion.finish_reason for completion in asyncio.run(everything())} == {"abort"}


def test_a_failing_step_is_reported_to_every_stream_and_the_engine_stays_usable(directory, prompts, alone):
    def broken(*args, **kwargs):
        raise RuntimeError("an idea that did not work")

    async def everything():
        llm = AsyncLLM(directory, dtype="float64", device="cpu")
        with minillm.using(rms_norm=broken):
            runs = asyncio.gather(*(llm.generate(p, GREEDY) for p in prompts[:4]), return_exceptions=True)
            for result in await asyncio.wait_for(runs, TIMEOUT):
                assert isinstance(result, RuntimeError) and "did not work" in str(result)
        assert (await llm.generate(prompts[0], GREEDY)).token_ids == alone[0]
        llm.close()

    asyncio.run(everything())


def test_a_borrowed_engine_stays_open_and_usable(directory, prompts, alone):
    async def everything(llm):
        served = AsyncLLM(engine=llm)
        streaming = asyncio.create_task(served.generate(prompts[1], GREEDY))
        offline = await asyncio.to_thread(llm.generate, prompts[0], GREEDY)
        completion = await streaming
        served.close()
        assert not served.alive
        return offline[0].token_ids, completion.token_ids

    with LLM(directory, dtype="float64", device="cpu") as llm:
        assert asyncio.run(everything(llm)) == (alone[0], alone[1])
        assert llm.generate(prompts[2], GREEDY)[0].token_ids == alone[2]
