"""A draft model keeps its cache in step with requests, and its head may have only some tokens."""

import json
import random

import numpy as np
import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.model.loader import read_config
from minillm.runner.draft_model import DraftModel, frequent_tokens, head_tokens
from minillm.speculation import Asked
from tests import models
from tests.chance import SEED
from tests.proofs import only_in_proofs

VOCABULARY = models.SMALL["vocab_size"]
MODELS = ["llama3-grouped", "gemma2-grouped-untied"]
directory = models.directories(MODELS)
ENGINES = {
    "plain": {},
    "few rows": {"max_num_seqs": 3},
    "few blocks": {"blocks": 24},
    "chunked": {"max_num_batched_tokens": 7},
}
SAMPLED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.3),
    SamplingParams(temperature=0, presence_penalty=1.0, logit_bias={7: 4.0}),
]


def made(directory, head=None, blocks=None, **options) -> DraftModel:
    sizes = {"dtype": "float64", "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64} | options
    draft = DraftModel(directory, read_config(directory), EngineConfig(**sizes).on("cpu"), 64, head)
    if blocks is not None:
        draft.pool.allocate(draft.pool.num_blocks - blocks)
    return draft


@pytest.mark.parametrize("engine", ["chunked", *only_in_proofs(*(name for name in ENGINES if name != "chunked"))])
@pytest.mark.explore
def test_drafts_are_those_of_a_model_that_sees_the_request_for_the_first_time(directory, engine):
    """However many of the drafts before were right, whoever else was asked for meanwhile, and what was evicted."""
    rng, used = random.Random(SEED + 7), made(directory, **ENGINES[engine])
    fresh = made(directory)
    texts = {f"r{i}": [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 14))] for i in range(5)}
    prompts = {name: len(tokens) for name, tokens in texts.items()}
    drafted, missing = 0, 0
    for _ in range(40):
        names = rng.sample(sorted(texts), rng.randint(1, 3))
        asked = [
            Asked(
                name,
                np.array(texts[name], np.int32),
                rng.randint(1, 5),
                params=SAMPLED[int(name[1])] if int(name[1]) < 4 else SAMPLED[1],
                seed=int(name[1]),
                prompt_length=prompts[name],
            )
            for name in names
        ]
        found = used.propose(asked)
        for each, drafts in zip(asked, found, strict=True):
            (expected,) = fresh.propose([each])
            fresh.forget(each.request_id)
            assert drafts in (expected, []), "what is not caught up yet, or has no blocks, gets none"
            drafted, missing = drafted + len(drafts), missing + (not drafts)
            right = rng.choice([0, len(drafts), rng.randint(0, len(drafts))])
            others = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 1, 3]))]
            texts[each.request_id] += [*drafts[:right], *others]
            if len(texts[each.request_id]) > 58 or rng.random() < 0.02:
                used.forget(each.request_id)
                texts[each.request_id] = texts[each.request_id][: prompts[each.request_id]]
    assert drafted > 80 and (missing < 5 if engine in ("plain", "few rows") else missing > 0)
    assert used.pool.available < used.pool.num_blocks
    for name in texts:
        used.forget(name)
    assert used.pool.available == (used.pool.num_blocks if engine != "few blocks" else 24)
    assert sorted(used._free) == list(range(len(used.known)))
    used.close()
    fresh.close()


def test_a_draft_that_was_wrong_is_not_what_the_next_one_follows(directory):
    used, fresh, tokens = made(directory), made(directory), [3, 1, 4]
    for _ in range(8):
        (found,) = used.propose([Asked("r", np.array(tokens, np.int32), 1)])
        fresh.forget("r")
        assert [found] == fresh.propose([Asked("r", np.array(tokens, np.int32), 1)])
        tokens.append((found[0] + 1) % VOCABULARY)


def test_a_request_longer_than_the_drafts_context_gets_none(directory):
    draft = made(directory)
    most = [[len(found) for found in draft.propose([Asked("r", np.ones(n, np.int32), 9)])] for n in (62, 63, 64, 70)]
    assert most == [[2], [1], [0], [0]]


def failing(*_):
    raise MemoryError


def test_a_step_that_fails_leaves_nothing_behind(directory, monkeypatch):
    draft = made(directory)
    asked = [Asked("r", np.arange(6, dtype=np.int32), 3)]
    expected = draft.propose(asked)
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(draft.executor.runner.model, "forward", failing)
        draft.propose([Asked("r", np.arange(7, dtype=np.int32), 3)])
    assert not draft.rows and draft.pool.available == draft.pool.num_blocks
    assert draft.propose(asked) == expected


def test_a_cut_head_drafts_the_likeliest_of_its_tokens(directory):
    tokens = frequent_tokens([9, 3, 3, 80, 9, 3, 41], 3, VOCABULARY)
    assert tokens == [3, 9, 41], "of 41 and 80, both once, the lower"
    whole, cut = made(directory), made(directory, head=tokens)
    prompt = np.array([5, 6, 7, 8], np.int32)
    logits = {}
    for draft in (whole, cut):
        model = draft.executor.runner.model
        logits[draft] = model.logits(torch.ones(2, model.config.hidden_size, dtype=torch.float64))
    assert torch.equal(logits[cut][:, tokens], logits[whole][:, tokens])
    assert logits[cut].isneginf().sum() == 2 * (VOCABULARY - 3)
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=2.0, presence_penalty=0.1)):
        (drafts,) = cut.propose([Asked(str(params.temperature), prompt, 5, params=params)])
        assert len(drafts) == 5 and set(drafts) <= set(tokens)


def test_the_head_is_cut_to_a_file_in_the_drafts_directory_or_another(directory, tmp_path):
    assert head_tokens(directory, None, VOCABULARY) is None
    (tmp_path / "draft_head.json").write_text("[5, 2, 95]")
    assert head_tokens(tmp_path, None, VOCABULARY) == [2, 5, 95]
    other = tmp_path / "other.json"
    for text in ("[]", "[1, 1]", "[96]", "[true]", '{"a": 1}', "[1.0]"):
        other.write_text(text)
        with pytest.raises(ConfigError, match="different token ids from 0 to 95"):
            head_tokens(tmp_path, str(other), VOCABULARY)
    other.write_text("[")
    for path in (other, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="cannot be read as JSON"):
            head_tokens(tmp_path, str(path), VOCABULARY)


def test_a_draft_model_needs_the_models_tokenizer(directory, tmp_path):
    with pytest.raises(ConfigError, match=r"vocabulary of 96 tokens and the model one of 4,096"):
        LLM(device="cpu", speculate=directory)
    with pytest.raises(ConfigError, match="no such model"):
        LLM(device="cpu", speculate="no-such-model")
    for name in ("off", "ngram"):
        with pytest.raises(ConfigError, match=f"speculate_head is for a draft model, and speculate='{name}' has none"):
            LLM(device="cpu", speculate=name, speculate_head="x.json")
    own = LLM(device="cpu")
    place = own.engine.tokenizer_directory
    own.close()
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((place / name).read_bytes())
    tokenizer = json.loads((place / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ConfigError, match="another tokenizer than the model: token 40"):
        LLM(device="cpu", speculate=tmp_path)
