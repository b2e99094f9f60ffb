"""Adapters and soft prompts on a GPU: the tokens of a CPU, in graphs and without.

float32 with TF32 off. Outputs may diverge only at a near-tie between the two likeliest tokens.
"""

import random

import pytest
import torch

from minillm import LLM, SamplingParams
from tests import models, peft_files
from tests.chance import SEED
from tests.engine.test_engine_on_gpu import exact_products, same_until_a_tie  # noqa: F401

PLAIN = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=2)
COUNT = 24


@pytest.fixture(scope="module")
def asked():
    rng = random.Random(SEED)
    return [[rng.randrange(1, 96) for _ in range(rng.choice([1, 5, 17, 60]))] for _ in range(COUNT)]


@pytest.mark.parametrize("name", ["gemma-multi-query", "gemma2-grouped-untied", "qwen3-grouped", "llama-biases"])
def test_a_batch_with_several_adapters_gets_the_cpus_tokens(name, asked, tmp_path):
    models.make(name).save_pretrained(tmp_path / "model")
    adapters = peft_files.several(tmp_path / "adapters", tmp_path / "model", 8)
    named = [None if i % 5 == 0 else [*adapters][i % 8] for i in range(COUNT)]
    made = {"adapters": adapters, "dtype": "float32", "num_blocks": 300}
    with LLM(tmp_path / "model", device="cpu", **made) as llm:
        wanted = llm.generate(asked, GREEDY, adapter=named)
    for options in ({}, {"max_num_batched_tokens": 40, "max_num_seqs": 5}, {"enforce_eager": True}):
        with LLM(tmp_path / "model", device="cuda", **made, **options) as llm:
            found = [llm.generate(asked, params, adapter=named) for params in (PLAIN, GREEDY)]
            alone = [llm.generate(asked[i], PLAIN, adapter=named[i])[0] for i in range(4)]
            graphs = llm.engine.executor.runner.graphs
            assert graphs is None or any(shape.reach for shape in graphs.captured.decodes), "none ran as a graph"
        for each in found:
            assert all(same_until_a_tie(f.token_ids, w) for f, w in zip(each, wanted, strict=True))
        assert all(same_until_a_tie(f.token_ids, w) for f, w in zip(alone, wanted, strict=False))


@pytest.mark.parametrize("options", [{"speculate_ahead": False}, {}], ids=str)
def test_drafts_change_nothing_for_requests_with_adapters(options, asked, tmp_path):
    models.make("gemma-multi-query").save_pretrained(tmp_path / "model")
    adapters = peft_files.several(tmp_path / "adapters", tmp_path / "model", 4)
    named = [None if i % 5 == 0 else [*adapters][i % 4] for i in range(COUNT)]
    made = {"adapters": adapters, "dtype": "float32", "num_blocks": 300, "device": "cuda"}
    repeated = [prompt * 3 for prompt in asked]
    with LLM(tmp_path / "model", **made) as llm:
        wanted = llm.generate(repeated, GREEDY, adapter=named)
    with LLM(tmp_path / "model", **made, speculate="ngram", **options) as llm:
        found = llm.generate(repeated, PLAIN, adapter=named)
    assert all(same_until_a_tie(f.token_ids, w) for f, w in zip(found, wanted, strict=True))


def test_embeddings_of_a_prompt_get_the_tokens_of_its_ids(asked):
    with LLM(dtype="float32", device="cuda", num_blocks=400) as llm:
        wanted = llm.generate(asked, GREEDY)
        model = llm.engine.executor.runner.model
        ids = [torch.tensor(each, device="cuda") for each in asked]
        prompts = [
            {"prompt_embeds": model.ops.embedding(each, model.embedding, model.embedding_scale).cpu()} for each in ids
        ]
        found = llm.generate(prompts, PLAIN)
    assert all(same_until_a_tie(f.token_ids, w) for f, w in zip(found, wanted, strict=True))
