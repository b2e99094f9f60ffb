"""With `exact` a position's logits have the same bits whatever else the step computes."""

import random
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import minillm
from minillm import LLM, SamplingParams, ops
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.kv_cache.layer_groups import blocks_held
from minillm.model.exact import make_exact
from minillm.model.loader import EMBEDDED, load_model, read_config
from minillm.ops import exact
from minillm.overrides import OverrideError
from minillm.runner.threads import Threads
from minillm.speculation import every_draft_runs
from tests import models
from tests.chance import SEED
from tests.engine.bits import Bits
from tests.proofs import only_in_proofs
from tests.speculation.proposers import Coin, following

pytestmark = pytest.mark.explore

SMALL = {"device": "cpu", "block_size": 4, "num_blocks": 400, "max_model_len": 160}
# Ways to compute the same requests. The first one has a step for each token of each request.
WAYS = {
    "alone": {"max_num_seqs": 1, "enable_prefix_caching": False},
    "together": {"max_num_seqs": 64},
    "in chunks": {"max_num_seqs": 5, "max_num_batched_tokens": 13, "run_ahead": 0},
    "drafted": {"max_num_seqs": 16, "speculate": "ngram", "speculate_tokens": 5},
    "preempted": {"max_num_seqs": 12, "max_num_batched_tokens": 16},
}
MODELS = [("gemma2-grouped-untied", "float32"), ("qwen3-grouped", "bfloat16")]
OTHERS = [each for each in product(models.CONFIGS, ("float32", "bfloat16", "float16", "float64")) if each not in MODELS]


def requests(count: int, vocab: int = 90) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 74 tokens; some begin alike, some repeat themselves."""
    rng = random.Random(SEED + count)
    shared = [rng.randrange(2, vocab) for _ in range(40)]
    prompts = []
    for i in range(count):
        own = [rng.randrange(2, vocab) for _ in range(rng.choice([1, 2, 7, 20, 34]))]
        prompts.append(shared[: rng.randint(5, 40)] + own if i % 3 == 0 else own * rng.randint(1, 2))
    params = [
        SamplingParams(max_tokens=rng.randint(2, 12), temperature=i % 3 / 2, seed=i % 5, ignore_eos=True)
        for i in range(count)
    ]
    return prompts, params


def computed(source, ways, count: int = 12, **options) -> tuple[Bits, dict[str, list]]:
    """The logits of the same requests in each of these ways, and their tokens."""
    bits, tokens = Bits(), {}
    prompts, params = requests(count)
    longest = max(len(prompt) + each.max_tokens for prompt, each in zip(prompts, params, strict=True))
    windows = read_config(source).groups(SMALL["max_model_len"]).windows
    few = {"num_blocks": blocks_held(longest, windows, 4, WAYS["preempted"]["max_num_batched_tokens"]) + 2}
    for name in ways:
        made = SMALL | options | (few if name == "preempted" else {})
        with bits.recorded(), every_draft_runs(), LLM(source, **made | WAYS[name]) as llm:
            if name == "drafted":
                outputs = following([list(p) + t for p, t in zip(prompts, tokens["alone"], strict=True)])
                coin = Coin(outputs, llm.model_config.vocab_size, 0.7)
                with minillm.using(proposer=partial(lambda made: made, coin)):
                    done = llm.generate(prompts, params)
                assert 0 < llm.stats()["accepted_tokens"] < llm.stats()["draft_tokens"]
            else:
                done = llm.generate(prompts, params)
            if name == "together":  # all again, with their prefixes from the cache
                again = llm.generate(prompts, params)
                assert [each.token_ids for each in again] == [each.token_ids for each in done]
                assert llm.stats()["prefix_hit_tokens"] > 0
            if name == "preempted":
                # Windows free blocks as rows grow, so that few rows have to wait.
                assert llm.stats()["preemptions"] > 0 or windows != (None,)
            tokens[name] = [each.token_ids for each in done]
    return bits, tokens


@pytest.mark.parametrize("name, dtype", [*MODELS, *only_in_proofs(*OTHERS)])
def test_logits_have_the_same_bits_however_a_request_is_computed(name, dtype, tmp_path):
    models.make(name).save_pretrained(tmp_path)
    bits, tokens = computed(tmp_path, WAYS, dtype=dtype, exact=True)
    assert bits.others == []
    assert bits.repeated > 60
    assert all(each == tokens["alone"] for each in tokens.values())


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8", "kv_cache_dtype": "int8"},
        *only_in_proofs(
            {"quantization": "w8a8"}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}, {"quantized_head": "int8"}
        ),
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_logits_of_quantized_models_have_the_same_bits(options, tmp_path):
    models.make("llama3-grouped").save_pretrained(tmp_path)
    bits, _ = computed(tmp_path, WAYS, dtype="float32", exact=True, **options)
    assert bits.others == [] and bits.repeated > 60


@pytest.mark.parametrize("count", [5, *only_in_proofs(64)])
@pytest.mark.parametrize("threads", [1, *only_in_proofs(2)])
def test_logits_of_the_embedded_model_have_the_same_bits(threads, count):
    bits, _ = computed(EMBEDDED, ["alone", "together", "in chunks"], count, exact=True, cpu_threads=threads)
    assert bits.others == [] and bits.repeated > 4 * count


def backwards(x, weight):
    """A product that sums in another order if there are several rows, as libraries do."""
    matrix = weight.dequantize()
    if len(x) > 1:
        x, matrix = x.flip(-1), matrix.flip(-1)
    return F.linear(x, matrix.contiguous(), weight.bias)


def test_an_order_that_depends_on_the_number_of_rows_is_noticed(tmp_path):
    """Without `exact`, and with a product that is not exact whatever the machine's library does."""
    models.make("llama3-grouped").save_pretrained(tmp_path)
    with minillm.using(linear=backwards):
        bits, _ = computed(tmp_path, ["alone", "together"], dtype="float32")
    assert len(bits.others) > 20


def test_prompts_are_scored_with_the_same_bits(tmp_path):
    models.make("gemma3-multi-query").save_pretrained(tmp_path)
    prompts, _ = requests(9)
    asked = SamplingParams(max_tokens=2, temperature=0, logprobs=3, prompt_logprobs=2)
    found = []
    for way in ("alone", "together", "in chunks"):
        with LLM(tmp_path, **SMALL | WAYS[way], exact=True) as llm:
            found.append([(each.prompt_logprobs, each.logprobs) for each in llm.generate(prompts, asked)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("options, named", [
    ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
    ({"attention_sinks": 4, "attention_window": 32}, "attention_sinks"),
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
    ({"max_loras": 1}, "adapters"),
])  # fmt: skip
def test_what_exact_does_not_cover_is_refused(options, named):
    with pytest.raises(ConfigError, match=f"exact and {named} exclude each other.*leave one of them out"):
        LLM(device="cpu", exact=True, **options)


def test_a_machine_that_sums_rows_of_a_product_differently_is_refused(monkeypatch):
    linear = F.linear

    def uneven(x, matrix, bias=None):
        out = linear(x, matrix, bias)
        out[-1] *= 1 + 1e-6
        return out

    monkeypatch.setattr(exact.F, "linear", uneven)
    with pytest.raises(ConfigError, match=r"exact: torch sums equal rows .* leave exact out"):
        LLM(device="cpu", exact=True)


def test_operations_of_a_user_are_refused_by_exact_engines_alone():
    params = SamplingParams(max_tokens=3, temperature=0)
    with LLM(device="cpu", exact=True) as llm, LLM(device="cpu") as other:
        expected = llm.generate("Once", params)[0].token_ids
        with minillm.using(linear=ops.reference.linear) as used:
            with pytest.raises(OverrideError, match="exact=True does not run a user-supplied linear"):
                llm.generate("Once", params)
            assert other.generate("Once", params)[0].token_ids and used.calls["linear"]
        assert llm.generate("Once", params)[0].token_ids == expected


def test_the_table_names_the_operations_of_exact_engines():
    table = {each["name"]: each for each in ops.table("cpu", exact=True)}
    assert table["linear"]["runs"] == table["decode_attention"]["runs"] == "exact"
    assert table["linear"]["why"] == "the same bits in every step"
    assert ops.on("cpu", exact=True) is not ops.on("cpu")


def test_the_number_of_threads_does_not_change():
    config = EngineConfig(exact=True).on("cpu")
    threads = Threads.of(config, None)
    assert threads.fixed and Threads.of(EngineConfig(exact=True, cpu_threads=3).on("cpu"), None).fixed == 3
    with LLM(device="cpu", exact=True) as llm:
        assert llm.engine.executor.threads.fixed == threads.fixed


def test_a_draft_model_need_not_be_exact():
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(device="cpu", exact=True) as llm, LLM(device="cpu", exact=True, speculate=EMBEDDED) as drafted:
        assert drafted.engine.draft_model.executor.runner.model.ops is ops.on("cpu")
        assert drafted.engine.model.ops is llm.engine.model.ops is ops.on("cpu", exact=True)
        assert drafted.generate("Once upon", params)[0].token_ids == llm.generate("Once upon", params)[0].token_ids


def test_a_gpu_without_kernels_is_refused(monkeypatch):
    model = load_model(EMBEDDED)
    monkeypatch.setattr(model, "device", torch.device("meta"))
    with pytest.raises(ConfigError, match="exact needs Triton's kernels on a GPU: no faster functions for meta"):
        make_exact(model)
