"""With `exact` a request gets the same tokens with drafts and without in bfloat16, where logits often tie."""

import random

import pytest

import minillm
from minillm import LLM, SamplingParams
from minillm.model.loader import EMBEDDED
from minillm.speculation import every_draft_runs
from tests import models
from tests.chance import SEED
from tests.proofs import only_in_proofs
from tests.speculation.proposers import Coin, following
from tests.speculation.test_same_tokens import requests

pytestmark = pytest.mark.explore

MADE = {"dtype": "bfloat16", "device": "cpu", "exact": True, "num_blocks": 1600, "block_size": 4}
OPTIONS = [{}, {"top_p": 0.8}, {"top_k": 5}, {"repetition_penalty": 1.3}, {"logprobs": 2}, {"min_p": 0.1}]


def outcomes(llm, prompts, params) -> list[tuple]:
    """Everything that requests get, log-probabilities to the last bit."""
    done = [each for first in llm.generate(prompts, params) for each in first.outputs]
    return [(each.token_ids, each.text, each.finish_reason, each.logprobs, each.prompt_logprobs) for each in done]


def compared(source, prompts, params, vocabulary, **options):
    """The outcomes with drafts of which most are right, and those without, of an engine with other batches."""
    with LLM(source, **MADE | options, max_num_seqs=48, enable_prefix_caching=False) as plain:
        expected = outcomes(plain, prompts, params)
        ids = [plain.tokenizer.encode(each) if isinstance(each, str) else each for each in prompts]
    outputs = following([own + tokens for own, (tokens, *_) in zip(ids, expected, strict=False)])
    with (
        every_draft_runs(),
        LLM(source, **MADE | options, speculate="ngram", speculate_tokens=5, max_num_seqs=16) as llm,
        minillm.using(proposer=lambda: Coin(outputs, vocabulary, 0.7)),
    ):
        found = outcomes(llm, prompts, params)
        assert 0 < llm.stats()["accepted_tokens"] < llm.stats()["draft_tokens"]
    return expected, found


@pytest.mark.parametrize("name, count", [("llama3-tied-head-dim", 200), *only_in_proofs(("gemma3-multi-query", 200))])
def test_drafts_change_nothing_in_bfloat16(name, count, tmp_path):
    models.make(name).save_pretrained(tmp_path)
    rng = random.Random(SEED + count)
    prompts = [[rng.randrange(2, 90) for _ in range(rng.randint(1, 12))] for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(2, 8),
            temperature=i % 3 / 2,
            seed=i % 7,
            ignore_eos=True,
            **OPTIONS[i % len(OPTIONS)],
        )
        for i in range(count)
    ]
    expected, found = compared(tmp_path, prompts, params, 96, max_model_len=64)
    assert found == expected


@pytest.mark.proof
def test_drafts_change_nothing_that_a_thousand_requests_get_in_bfloat16():
    """Requests of all kinds on the embedded model."""
    prompts, params = requests(1000, seed=37)
    expected, found = compared(EMBEDDED, prompts, params, 4096)
    assert len(found) >= 1000 and found == expected
