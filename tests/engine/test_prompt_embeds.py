"""Embeddings as a prompt: what they compute is what their tokens compute, next to any other requests."""

import random
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from minillm import LLM, InvalidRequest, RequestOptions, SamplingParams
from minillm.prompts import EMBEDDED
from minillm.speculation import every_draft_runs
from tests import models
from tests.chance import SEED, TIMES
from tests.proofs import only_in_proofs

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TINY = str(Path(__file__).resolve().parents[2] / "data" / "tiny-gemma")
TEXT = "Once upon a time there was an island where the old lighthouse keeper lived alone with his cat."


def read_by(llm: LLM, ids) -> torch.Tensor:
    """The embeddings of tokens, [n, hidden], as the model reads them."""
    model = llm.engine.model
    return model.ops.embedding(torch.tensor(list(ids)), model.embedding, model.embedding_scale)


@contextmanager
def small(model=TINY, **options):
    """A model in float64, in which equal prompts have equal tokens whatever else runs, with little of everything."""
    few = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "num_blocks": 24, "max_model_len": 256}
    with LLM(model, **({"dtype": "float64", "device": "cpu"} | few | options)) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm():
    with small() as llm:
        yield llm


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """Much smaller, without a tokenizer."""
    folder = tmp_path_factory.mktemp("embeddings")
    models.make("gemma-grouped", max_position_embeddings=256).save_pretrained(folder)
    return folder


@pytest.fixture
def ids(llm):
    return llm.tokenizer.encode(TEXT)


@pytest.mark.key
def test_embeddings_of_tokens_give_the_tokens_that_those_give(llm, ids):
    known = read_by(llm, ids)
    prompts = [
        ids,
        {"prompt_embeds": known},
        {"prompt_embeds": known.numpy()},
        {"parts": [known[:3], ids[3:9], known[9:]]},
        {"parts": [TEXT[:9], known[3:8], TEXT[24:]]},
        {"parts": [ids]},
    ]
    first, *others = llm.generate(prompts, GREEDY)
    assert [each.token_ids for each in others] == [first.token_ids] * 5
    assert [each.text for each in others] == [first.text] * 5
    assert others[0].prompt_token_ids == [EMBEDDED] * len(ids)
    assert others[2].prompt_token_ids == [EMBEDDED] * 3 + ids[3:9] + [EMBEDDED] * (len(ids) - 9)


@pytest.mark.key
@pytest.mark.parametrize("name", ["gemma-grouped", "gemma3-multi-query", "llama3-grouped", "qwen2-sliding-tied"])
def test_embeddings_are_those_that_transformers_takes(name, tmp_path):
    model = models.make(name).double().eval()
    model.save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    torch.manual_seed(5)
    drawn = torch.randn(1, 21, model.config.hidden_size, dtype=torch.float64)
    expected = reference.generate(
        inputs_embeds=drawn, attention_mask=torch.ones(1, 21), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    with LLM(tmp_path, dtype="float64", device="cpu", max_num_batched_tokens=8) as llm:
        (done,) = llm.generate(
            {"prompt_embeds": drawn[0]}, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        )
    assert done.token_ids == expected[0].tolist()


@pytest.mark.key
def test_a_prefix_is_shared_by_equal_embeddings_only(random_model):
    with small(random_model) as llm:
        shared_by_equal_embeddings_only(llm)


def shared_by_equal_embeddings_only(llm):
    ids, block = [5 + i * i % 80 for i in range(20)], llm.engine.config.block_size
    known = read_by(llm, ids)

    def cached(prompt, salt="embeddings"):
        return llm.generate(prompt, GREEDY, RequestOptions(cache_salt=salt))[0].num_cached_tokens

    assert cached({"prompt_embeds": known}) == 0 < block <= cached({"prompt_embeds": known.clone()})
    assert cached({"prompt_embeds": known}, "another tenant") == 0
    assert cached({"prompt_embeds": torch.cat([known[:block], known[:9]])}) == block
    for at in (0, block - 1):
        other = known.clone()
        other[at, 7] = np.nextafter(other[at, 7].item(), np.inf)
        assert cached({"prompt_embeds": other}) == 0
    assert cached(ids) == 0, "tokens found what their embeddings left"
    assert cached({"parts": [ids[:1], known[1:]]}) == 0
    assert cached({"parts": [known[:1], ids[1:]]}) == 0
    other = known.clone()
    other[:block] = 0
    assert cached({"prompt_embeds": other}) == 0


@pytest.mark.key
def test_a_preempted_request_brings_its_embeddings_again(random_model):
    ids = [5 + i * i % 80 for i in range(20)]
    with small(
        random_model, num_blocks=12, max_num_seqs=3, max_num_batched_tokens=48, enable_prefix_caching=False
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        (alone,) = llm.generate(ids, params)
        done = llm.generate([{"prompt_embeds": read_by(llm, ids)}] * 3, params)
        assert llm.stats()["preemptions"] > 0
        assert [each.token_ids for each in done] == [alone.token_ids] * 3


@pytest.mark.key
def test_what_a_step_reads_is_let_go_once_it_has_run(llm, ids):
    llm.generate([{"prompt_embeds": read_by(llm, ids)}] * 5, GREEDY)
    assert not llm.engine.executor.runner.state.embedded._of


@pytest.mark.key
def test_a_chunk_of_one_embedding_is_no_decode(random_model):
    """With a token a step, or all but one in the cache, a prompt's step looks like a decode."""
    ids = [5 + i * i % 80 for i in range(20)]
    with small(random_model, max_num_batched_tokens=1, max_num_seqs=1) as llm:
        known = read_by(llm, ids)
        tokens, embedded, again = (llm.generate(each, GREEDY)[0] for each in (ids, *[{"prompt_embeds": known}] * 2))
        assert tokens.token_ids == embedded.token_ids == again.token_ids


@pytest.mark.key
def test_penalties_count_tokens_and_no_embeddings(llm, ids):
    known, most = read_by(llm, ids), {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    outputs = SamplingParams(presence_penalty=1.5, frequency_penalty=1.5, **most)
    plain, embedded = llm.generate([ids, {"prompt_embeds": known}], outputs)
    assert plain.token_ids == embedded.token_ids
    everything = SamplingParams(repetition_penalty=1.8, **most)
    plain, mixed, embedded = llm.generate(
        [ids, {"parts": [known[:5], ids[5:]]}, {"prompt_embeds": known}], everything, RequestOptions("penalties")
    )
    (unpenalized,) = llm.generate(ids, GREEDY)
    assert embedded.token_ids[0] == unpenalized.token_ids[0], "nothing has been seen yet"
    assert plain.token_ids != embedded.token_ids
    assert len(set(embedded.token_ids)) >= len(set(unpenalized.token_ids))


@pytest.mark.key
def test_choices_stops_grammars_scores_and_listeners(llm, ids):
    prompt = {"prompt_embeds": read_by(llm, ids)}
    seeded = SamplingParams(temperature=1, seed=3, n=3, max_tokens=8, ignore_eos=True, logprobs=2)
    tokens, embedded = llm.generate([ids, prompt], seeded)
    assert [each.token_ids for each in embedded.outputs] == [each.token_ids for each in tokens.outputs]
    for one, other in zip(tokens.outputs, embedded.outputs, strict=True):
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.keys() == b.keys() and all(abs(a[token] - b[token]) < 1e-9 for token in a)
        assert one.text_offsets == other.text_offsets
    end = tokens.text[2:6]
    stopped = SamplingParams(temperature=1, seed=3, max_tokens=8, stop=end)
    tokens, embedded = llm.generate([ids, prompt], stopped)
    assert embedded.text == tokens.text and embedded.stop_reason == tokens.stop_reason == end
    written = SamplingParams(temperature=0, max_tokens=30, regex="(yes|no), [0-9]{3}")
    tokens, embedded = llm.generate([ids, prompt], written)
    assert embedded.text == tokens.text and embedded.finish_reason == "stop"
    (nothing,) = llm.generate(prompt, SamplingParams(max_tokens=0))
    assert nothing.token_ids == [] and nothing.finish_reason == "length"


@pytest.mark.key
@pytest.mark.parametrize("speculate", ["ngram", "self"])
def test_drafts_change_no_token_and_none_is_an_embedding(speculate, ids):
    draft = TINY if speculate == "self" else speculate
    ids = [*ids, 7, 7, *ids]  # what followed 7, 7 is to be drafted after them
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logit_bias={7: 30})
    with every_draft_runs(), small(speculate=draft, num_blocks=64) as llm:
        known, after = read_by(llm, ids), len(ids) // 2 + 1
        mixed = {"parts": [ids[:after], known[after:]]}
        first, *others = llm.generate([ids, {"prompt_embeds": known}, mixed], params)
        assert first.token_ids[:2] == [7, 7] and [each.token_ids for each in others] == [first.token_ids] * 2
        assert llm.stats()["draft_tokens"] > 0


@pytest.mark.key
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_embeddings_are_read_as_they_are_whatever_the_weights(quantization):
    with small(quantization=quantization, dtype="float32") as llm:
        ids = llm.tokenizer.encode(TEXT)
        tokens, embedded = llm.generate([ids, {"prompt_embeds": read_by(llm, ids)}], GREEDY)
        assert tokens.token_ids == embedded.token_ids


@pytest.mark.key
def test_embeddings_that_make_no_numbers_end_their_own_request_only(llm, ids):
    with small(dtype="float32") as llm:
        (alone,) = llm.generate(ids, GREEDY)
        huge = torch.full((20, llm.model_config.hidden_size), 3e38)
        huge[::2] *= -1
        before, bad, after = llm.generate([ids, {"prompt_embeds": huge}, ids], GREEDY)
        assert before.token_ids == after.token_ids == alone.token_ids
        assert bad.finish_reason in ("abort", "length")
        assert llm.generate(ids, GREEDY)[0].token_ids == alone.token_ids


WRONG = {
    "another hidden size": ({"prompt_embeds": torch.zeros(3, 5)}, "shape"),
    "a longer prompt than fits": ({"prompt_embeds": torch.zeros(1, 1).expand(300, 256)}, "300 rows"),
    "NaN": ({"prompt_embeds": torch.full((3, 256), torch.nan)}, "finite"),
    "no tensor": ({"prompt_embeds": "AAAA"}, "must be a tensor"),
    "no such form": ({"embeds": torch.zeros(3, 256)}, '"prompt_embeds" or "parts"'),
    "two forms": ({"prompt_embeds": torch.zeros(3, 256), "parts": [[5]]}, '"prompt_embeds" or "parts"'),
    "nothing": ({}, '"prompt_embeds" or "parts"'),
    "no parts": ({"parts": []}, "list of texts"),
    "a part of nothing": ({"parts": [[5], []]}, "part 1: the prompt is empty"),
    "a part with another hidden size": ({"parts": [[5], torch.zeros(3, 5)]}, "part 1: prompt_embeds"),
    "a part with no token": ({"parts": [[5], [10**6]]}, "part 1: token id 1000000"),
    "a placeholder without an embedding": ([5, EMBEDDED], "token id -1"),
}


@pytest.mark.key
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_prompt_is_refused_before_anything_runs(wrong, llm):
    prompt, message = WRONG[wrong]
    with pytest.raises(InvalidRequest, match=message):
        llm.generate([[5, 6], prompt], GREEDY)


@pytest.mark.key
def test_scoring_a_prompt_needs_tokens(llm, ids):
    with pytest.raises(InvalidRequest, match="prompt_logprobs scores tokens"):
        llm.generate({"prompt_embeds": read_by(llm, ids)}, SamplingParams(prompt_logprobs=1))


KINDS = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1, "top_k": 7},
    {"temperature": 1, "min_p": 0.05},
    {"temperature": 1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1, "logit_bias": {7: 5.0, 40: -100.0}},
)


def cut(rng: random.Random, ids: list[int], known: torch.Tensor) -> dict:
    """A prompt of the same tokens, some of them as embeddings, in random spans."""
    bounds = sorted({0, len(ids), *(rng.randrange(1, len(ids) + 1) for _ in range(rng.choice([0, 1, 1, 3, 6])))})
    embedded = rng.random() < 0.7
    parts = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        parts.append(known[begin:end] if embedded else ids[begin:end])
        embedded = not embedded
    return {"parts": parts}


RANDOM = [
    {"options": {}, "count": 60},
    {"options": {"speculate": "ngram", "max_num_batched_tokens": 40}, "count": 40},
]
LONG = [
    {"options": {}, "count": 1000},
    {"options": {"speculate": "ngram", "max_num_batched_tokens": 40, "block_size": 8, "num_blocks": 48}, "count": 300},
    {"options": {"max_num_batched_tokens": 7, "max_num_seqs": 9, "run_ahead": 3, "num_blocks": 24}, "count": 300},
]


@pytest.mark.explore
@pytest.mark.parametrize("case", RANDOM + only_in_proofs(*LONG), ids=str)
def test_random_mixed_requests_have_the_tokens_of_their_tokens(case, random_model):
    """Prefix hits, chunks, preemptions and aborts; half of the prompts have tokens alone."""
    rng, count = random.Random(SEED + 5), case["count"] * TIMES
    tight = {"num_blocks": 20, "max_num_seqs": 5, "run_ahead": 2} | case["options"]
    drafting = every_draft_runs() if "speculate" in tight else nullcontext()
    shared, requests = [17 + i % 50 for i in range(64)], []
    for i in range(count):
        ids = shared[: rng.choice([0, 20, 64])] + [rng.randrange(4, 96) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(max_tokens=rng.randint(1, 30), seed=i, ignore_eos=True, **rng.choice(KINDS))
        requests.append((ids, params))
    with small(random_model, num_blocks=400, max_num_seqs=32, max_num_batched_tokens=400) as plain:
        expected = plain.generate([ids for ids, _ in requests], [params for _, params in requests])
    with drafting, small(random_model, **tight) as llm:
        engine, known, started = llm.engine, read_by(llm, range(96)), []
        left = [(ids if rng.random() < 0.5 else cut(rng, ids, known[ids]), params) for ids, params in requests]
        while left or engine.tracked:
            while left and rng.random() < 0.6:
                started.append(engine.prepare(*left.pop(0)))
                engine.submit(started[-1])
            if rng.random() < 0.02 and engine.tracked:
                engine.abort(rng.choice(list(engine.tracked)))
            engine.step()
        engine.scheduler.check()
        stats = engine.stats()
        assert stats["preemptions"] > 0 and stats["prefix_hit_tokens"] > 0
        assert "speculate" not in tight or stats["draft_tokens"] > 0
    pairs = zip(started, expected, strict=True)
    assert not [i for i, (each, other) in enumerate(pairs) if not same(each.completion, other)]


def same(done, expected) -> bool:
    """Whether a request has the tokens that it should have, or an aborted one their beginning."""
    if done.finish_reason == "abort":
        return expected.token_ids[: len(done.token_ids)] == done.token_ids
    return (done.token_ids, done.finish_reason) == (expected.token_ids, expected.finish_reason)
