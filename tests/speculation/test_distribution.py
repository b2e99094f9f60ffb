"""Outputs with drafts have the model's own distribution. Three acceptance rules that break it are noticed.

Drafts are drawn by a coin from another distribution than the model's, so that some are right and most are wrong. The
exact distribution of a whole output is enumerated by transformers, from every prefix that `top_k` leaves.
"""

import random
from collections import Counter
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chi2

import minillm
from minillm import LLM, SamplingParams
from minillm.ops import reference
from minillm.runner.launched import Results, agreed
from minillm.scheduler import Scheduler
from minillm.speculation import every_draft_runs
from tests import models

PROMPT, KEPT, LENGTH = [3, 17, 4, 88, 9], 3, 4  # tokens that top_k leaves, and those of an output
DRAFTED = (0.6, 0.3, 0.1)  # how often the tokens of the candidates, the least likely first, are drafted
OUTPUTS, BLOCKS, BLOCK = 1200, 400, 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    models.make("llama3-grouped").save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def exact(directory) -> dict[tuple[int, ...], dict[int, float]]:
    """For each beginning of an output: the tokens that can follow, and their probabilities."""
    model, found, beginnings = models.reference(directory), {}, [()]
    for _ in range(LENGTH):
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *each] for each in beginnings])).logits[:, -1].double()
        values, tokens = logits.topk(KEPT)
        for each, kept, probabilities in zip(beginnings, tokens.tolist(), values.softmax(-1).tolist(), strict=True):
            found[each] = dict(zip(kept, probabilities, strict=True))
        beginnings = [(*each, token) for each in beginnings for token in found[each]]
    return found


class Skewed:
    """Draws each draft from the model's candidates with probabilities of its own; `chance` is that of each draft."""

    chance: dict[int, float]

    def __init__(self, exact):
        self.exact, self.rng = exact, random.Random(5)

    def propose(self, asked):
        return [self._drafts(tuple(each.tokens[len(PROMPT) :].tolist()), each.most) for each in asked]

    def _drafts(self, output, most):
        drafts: list[int] = []
        for _ in range(most):
            candidates = list(self.exact[(*output, *drafts)])[::-1]
            drafts += self.rng.choices(candidates, DRAFTED)
        return drafts

    def forget(self, request_id):
        pass


def p_value(directory, exact) -> float:
    """How likely a fit to the exact distribution is that is no better than that of this engine's outputs."""
    made = {"num_blocks": BLOCKS, "block_size": BLOCK, "max_num_seqs": 128, "dtype": "float64", "device": "cpu"}
    params = [
        SamplingParams(max_tokens=LENGTH, temperature=1.0, top_k=KEPT, seed=seed, ignore_eos=True)
        for seed in range(OUTPUTS)
    ]
    with (
        LLM(directory, **made, speculate="ngram", speculate_tokens=LENGTH) as llm,
        minillm.using(proposer=lambda: Skewed(exact)),
    ):
        outputs = Counter(tuple(each.outputs[0].token_ids) for each in llm.generate([PROMPT] * OUTPUTS, params))
        stats = llm.stats()
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"]
    expected, found = [0.0], [0]  # the first of both counts what is too rare for the test's approximation
    for ranks in product(range(KEPT), repeat=LENGTH):
        output: tuple[int, ...] = ()
        share = 1.0
        for rank in ranks:
            token, probability = list(exact[output].items())[rank]
            output, share = (*output, token), share * probability
        if share * OUTPUTS < 7:
            expected[0], found[0] = expected[0] + share * OUTPUTS, found[0] + outputs.pop(output, 0)
        else:
            expected.append(share * OUTPUTS)
            found.append(outputs.pop(output, 0))
    assert expected[0] > 5 and len(expected) > 20
    if outputs:
        return 0.0  # there are outputs of probability 0
    wanted, got = np.array(expected), np.array(found)
    return float(chi2.sf(((got - wanted) ** 2 / wanted).sum(), len(wanted) - 1))


@pytest.fixture(autouse=True)
def all_drafts_run():
    with every_draft_runs():
        yield


def test_outputs_have_the_exact_distribution(directory, exact):
    assert p_value(directory, exact) > 0.01


@contextmanager
def accepts_by_the_drafts_probability(monkeypatch):
    """A draft is accepted with the probability with which it is drafted at most, whatever the model says."""
    rng = np.random.default_rng(1)

    def rule(step, sampled):
        results = agreed(step, sampled)
        if step.drafts is None:
            return results
        drafts = step.drafts[step.samples]
        right = (rng.random(drafts.shape) < max(DRAFTED)) & (drafts >= 0)
        count = np.cumprod(right, axis=1).sum(axis=1)
        taken = np.arange(results.tokens.shape[1]) < count[:, None]
        return Results(np.where(taken, np.pad(drafts, ((0, 0), (0, 1))), results.tokens), 1 + count)

    monkeypatch.setattr("minillm.runner.launched.agreed", rule)
    yield


@contextmanager
def compares_one_position_too_late(monkeypatch):
    """A draft is compared with the token that was sampled after it."""

    def rule(step, sampled):
        results = agreed(step, sampled)
        if step.drafts is None:
            return results
        drafts = step.drafts[step.samples]
        right = (results.tokens[:, 1:] == drafts) & (drafts >= 0)
        return Results(results.tokens, 1 + np.cumprod(right, axis=1).sum(axis=1))

    monkeypatch.setattr("minillm.runner.launched.agreed", rule)
    yield


@contextmanager
def keeps_the_keys_of_rejected_drafts(monkeypatch):
    """The token that is sampled instead of a draft does not overwrite the draft's keys and values."""
    reject, write, layers = Scheduler._reject, reference.write_kv, models.SMALL["num_hidden_layers"]
    stale: Counter[int] = Counter()

    def rejecting(self, step, accepted):
        before = self.computed.copy()
        reject(self, step, accepted)
        for row in np.flatnonzero(self.computed < before):
            at = int(self.computed[row])
            stale[int(self.tables.blocks[0, row, at // BLOCK]) * BLOCK + at % BLOCK] = layers

    def writing(k, v, cache, slots):
        written = torch.tensor([stale[slot] == 0 for slot in slots.tolist()])
        stale.subtract(slots[~written].tolist())
        write(k[written], v[written], cache, slots[written])

    monkeypatch.setattr(Scheduler, "_reject", rejecting)
    with minillm.using(write_kv=writing):
        yield


@pytest.mark.parametrize(
    "rule",
    [accepts_by_the_drafts_probability, compares_one_position_too_late, keeps_the_keys_of_rejected_drafts],
    ids=lambda rule: rule.__name__,
)
def test_a_wrong_rule_is_noticed(rule, directory, exact, monkeypatch):
    with rule(monkeypatch):
        assert p_value(directory, exact) < 1e-9
