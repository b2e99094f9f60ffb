"""The effect of each sampling parameter on the distribution, compared with a simple slow implementation."""

import math

import numpy as np
import pytest
import torch

from minillm import InvalidRequest, SamplingParams, ops
from minillm.ops.signatures import Truncation
from minillm.runner.adjusted_logits import forbid, penalize
from minillm.runner.logprobs import top_logprobs
from minillm.runner.sampler import Sampler, uniforms
from minillm.runner.sampling_columns import derived_seed, mix
from minillm.runner.state import RowState
from minillm.scheduler.step import NewRow
from tests.proofs import only_in_proofs

pytestmark = pytest.mark.key

VOCABULARY, DRAWS = 12, 10_000
LOGITS = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 2.2, 0.3, -2.0, 1.1, 0.7]
PROMPT, OUTPUT = [0, 3, 3, 6], [1, 7, 7, 7]  # 6 has a logit below 0, and so does 9, which is in neither


def expected(params: SamplingParams) -> np.ndarray:
    """Probabilities, one token at a time, in the documented order."""
    logits = list(LOGITS)
    for token, value in (params.logit_bias or {}).items():
        logits[token] += value
    for token in set(PROMPT + OUTPUT):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(OUTPUT):
        logits[token] -= params.frequency_penalty * OUTPUT.count(token) + params.presence_penalty
    if len(OUTPUT) < params.min_tokens:
        for token in params.stop_token_ids:
            logits[token] = -math.inf
    weights = [math.exp(logit / params.temperature) for logit in logits]
    kept = [weight if weight >= params.min_p * max(weights) else 0 for weight in weights]
    ranked = sorted(range(VOCABULARY), key=lambda token: -kept[token])
    if params.top_k > 0:
        for token in ranked[params.top_k :]:
            kept[token] = 0
    total, before = sum(kept), 0.0
    for token in ranked:
        weight = kept[token]
        if before >= params.top_p * total:
            kept[token] = 0
        before += weight
    return np.array(kept) / sum(kept)


def rows(count: int) -> RowState:
    return RowState(count, longest=15, groups=1, blocks=1, block_size=16, device=torch.device("cpu"))


def new_row(row: int, params: SamplingParams, seed: int) -> NewRow:
    return NewRow(row, np.array(PROMPT, np.int32), len(PROMPT), params, seed, tuple(params.stop_token_ids))


def draw(params: SamplingParams, logits=None, draws: int = DRAWS) -> torch.Tensor:
    """One token for each of `draws` requests that differ only in their seeds."""
    known = PROMPT + OUTPUT
    state = rows(draws)
    for row in range(draws):
        state.sampling.fill(new_row(row, params, derived_seed(0, row)))
    state.prompt_length[:] = len(PROMPT)
    state.tokens[:, : len(known)] = torch.tensor(known)
    state.tokens[:, len(known) :] = 9  # tokens after a row's length must be ignored
    logits = torch.tensor(LOGITS if logits is None else logits).expand(draws, -1).contiguous()
    return Sampler(state, ops.on("cpu"))(logits, np.arange(draws), np.full(draws, len(known), np.int64))


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 4},
    {"top_p": 0.6},
    {"top_p": 0.05},
    {"min_p": 0.3},
    {"min_p": 0.5, "temperature": 3.0},
    {"min_p": 1},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"presence_penalty": -1.0},
    {"frequency_penalty": 0.8},
    {"logit_bias": {9: 4.0, 7: -100}},
    {"min_tokens": 5, "stop_token_ids": [7, 0]},
    {"min_tokens": 4, "stop_token_ids": [7, 0]},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.8, "min_p": 0.1, "frequency_penalty": 0.2, "logit_bias": {5: 2.0}},
]


def test_greedy_requests_are_not_truncated(monkeypatch):
    """What the likeliest token is does not depend on it, and ranking a vocabulary takes long."""
    state, seen = rows(2), []
    state.sampling.fill(new_row(0, SamplingParams(temperature=0, top_p=0.5, top_k=2, min_p=0.1), 0))
    state.sampling.fill(new_row(1, SamplingParams(top_k=-1), 0))
    own = ops.on("cpu").sample
    monkeypatch.setattr(ops.on("cpu"), "sample", lambda *given: seen.append(given[3]) or own(*given))
    logits = torch.tensor(LOGITS).expand(2, -1).contiguous()
    assert Sampler(state, ops.on("cpu"))(logits, np.arange(2), np.full(2, len(PROMPT)))[0] == logits[0].argmax()
    assert seen == [None]


@pytest.mark.parametrize("case", [CASES[0], *only_in_proofs(*CASES[1:-1]), CASES[-1]], ids=str)
def test_draws_follow_the_documented_distribution(case):
    params = SamplingParams(**case)
    probabilities = expected(params)
    counts = np.bincount(draw(params).numpy(), minlength=VOCABULARY)
    assert counts[probabilities == 0].sum() == 0, "a token with probability 0 was drawn"
    possible = probabilities > 0
    deviation = ((counts - DRAWS * probabilities)[possible] ** 2 / (DRAWS * probabilities[possible])).sum()
    freedom = possible.sum() - 1
    assert deviation < freedom + 5 * math.sqrt(2 * freedom) + 5, f"chi-square {deviation:.1f} with {freedom} degrees"


def test_stages_run_in_the_documented_order():
    documented = SamplingParams.__doc__.split("The steps run in this order: ")[1].split(".")[0]
    names = ["grammar" if "grammar" in step else step.strip() for step in documented.split(",")]
    assert names == [*(stage.__name__ for stage in Sampler.STAGES), "temperature", *Truncation._fields]


@pytest.mark.parametrize("case", [case for case in CASES[1:] if case.get("min_tokens") != len(OUTPUT)], ids=str)
def test_each_parameter_changes_the_distribution(case):
    """Otherwise the test above would pass even if the parameter were ignored."""
    assert np.abs(expected(SamplingParams(**case)) - expected(SamplingParams())).max() > 0.02


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_keeps_nothing_of_the_request_before(case):
    much = SamplingParams(
        temperature=0.3, top_k=2, top_p=0.5, min_p=0.4, repetition_penalty=1.7, presence_penalty=1.1,
        frequency_penalty=-0.9, min_tokens=3, stop_token_ids=[4], logit_bias={3: 2.0},
    )  # fmt: skip
    used, fresh = rows(1).sampling, rows(1).sampling
    used.fill(new_row(0, much, 5))
    for columns in (used, fresh):
        columns.fill(new_row(0, SamplingParams(**case | {"temperature": 0}), 6))
    assert repr(vars(used)) == repr(vars(fresh)) != repr(vars(rows(1).sampling))


def test_temperature_zero_takes_the_likeliest_token():
    assert set(draw(SamplingParams(temperature=0), draws=50).tolist()) == {7}
    biased = SamplingParams(temperature=0, logit_bias={2: 9.0}, top_p=0.3)
    assert set(draw(biased, draws=50).tolist()) == {2}


def test_greedy_and_sampling_rows_share_a_batch():
    state = rows(3)
    for row, params in enumerate(
        [SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(temperature=0.01)]
    ):
        state.sampling.fill(new_row(row, params, row))
    logits = torch.tensor([LOGITS, LOGITS[::-1], LOGITS])
    found = Sampler(state, ops.on("cpu"))(logits, np.arange(3), np.full(3, 4))
    assert found.tolist() == [7, 4, 7]


EXTREMES = [
    {"top_p": 1e-60},
    {"top_p": 1e-46, "temperature": 0},
    {"temperature": 1e-39, "top_p": 0.9},
    {"temperature": 1e-39, "min_p": 0.1},
    {"temperature": 1e-39, "logit_bias": {5: 0.0}},
    {"temperature": 1e-300, "top_k": 3},
    {"temperature": 1e-39, "repetition_penalty": 1e-3, "logit_bias": {7: 100, 0: -100, 3: -100, 1: -100}},
]


@pytest.mark.parametrize("case", EXTREMES, ids=str)
@pytest.mark.parametrize("kernels", [False, True], ids=["CPU", "kernels"])
def test_the_smallest_accepted_values_choose_the_likeliest_token(case, kernels, monkeypatch):
    """They underflow in float32, or make logits infinite when divided by them; the step must not fail."""
    if kernels:
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled here, and these logits are on the CPU")
        fast = pytest.importorskip("minillm.ops.triton", reason="triton is not installed here")
        monkeypatch.setattr(ops.on("cpu"), "sample", fast.sample)
    assert set(draw(SamplingParams(**case), draws=12).tolist()) == {7}


def test_huge_and_infinite_logits_do_not_overflow():
    logits = [1e30, -1e30, *[0.0] * 8, -math.inf, 3e38]
    assert set(draw(SamplingParams(), logits, 20).tolist()) == {11}


def test_uniforms_are_uniform_and_depend_only_on_seed_and_position():
    numbers = uniforms(mix(np.arange(50_000, dtype=np.uint64)), np.full(50_000, 3))
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 99 + 5 * math.sqrt(198)
    along = uniforms(mix(np.full(50_000, 7, np.uint64)), np.arange(50_000))
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.02
    seven, eight = mix(np.array([7, 8], np.uint64))
    assert uniforms(np.array([seven, eight]), np.array([5, 5])).tolist() == [
        along[5],
        uniforms(np.array([eight]), np.array([5]))[0],
    ]


def test_logprobs_list_the_chosen_token_first():
    logits = torch.tensor([LOGITS, LOGITS[::-1]])
    ids, values = top_logprobs(logits, torch.tensor([9, 2]), 3)
    assert ids[:, 0].tolist() == [9, 2] and ids[0, 1:].tolist() == [7, 0, 1]
    assert torch.allclose(values, logits.log_softmax(-1).gather(1, ids))


def test_logprobs_of_half_precision_logits_are_computed_in_float32():
    logits = torch.tensor([LOGITS], dtype=torch.bfloat16)
    _, values = top_logprobs(logits, torch.tensor([9]), VOCABULARY)
    assert values.dtype == torch.float32
    assert torch.logsumexp(values[0, 1:], 0).abs() < 1e-6, "probabilities sum to 1"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"max_tokens": -1}, "max_tokens must be a whole number from 0 to 2147483647, not -1"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number"),
        ({"min_tokens": 17}, r"min_tokens \(17\) is above max_tokens \(16\)"),
        ({"temperature": -1}, "temperature must be a number in"),
        ({"temperature": math.nan}, "temperature must be a number in"),
        ({"temperature": "hot"}, "temperature must be a number in"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be a number in"),
        ({"top_k": -2}, "top_k must be a whole number from -1"),
        ({"min_p": 2}, "min_p must be a number in"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number in .0.001, 10000."),
        ({"repetition_penalty": 1e-46}, "repetition_penalty must be a number in"),
        ({"presence_penalty": 3}, "presence_penalty must be a number in"),
        ({"frequency_penalty": -3}, "frequency_penalty must be a number in"),
        ({"seed": 2**64}, "seed must be a 64-bit whole number"),
        ({"stop": [""]}, "stop strings must be non-empty"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be token ids"),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be a whole number from 0 to 20"),
        ({"logit_bias": {3: 101}}, "logit_bias maps token ids to numbers"),
        ({"logit_bias": {3: True}}, "logit_bias maps token ids to numbers"),
    ],
)
def test_invalid_parameters_are_reported_by_name(case, message):
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**case)


def test_a_row_keeps_no_wish_for_log_probabilities_of_the_request_before():
    state = rows(1)
    state.fill([new_row(0, SamplingParams(logprobs=3, prompt_logprobs=2), 1)])
    assert (state.logprobs[0], state.prompt_logprobs[0]) == (3, 2)
    state.fill([new_row(0, SamplingParams(), 2)])
    assert (state.logprobs[0], state.prompt_logprobs[0]) == (-1, -1)


def test_a_mask_forbids_the_tokens_whose_bits_are_0_in_its_own_row():
    """Ten tokens in two bytes, lowest bits first; the last six bits are no tokens."""
    masks = torch.tensor([[0b10000011, 0b11111110], [0b00001000, 0b01]], dtype=torch.uint8)
    logits = torch.arange(30.0).reshape(3, 10)
    found = forbid(logits.clone(), torch.tensor([2, 0]), masks)
    allowed = [(found[row] > -torch.inf).nonzero().flatten().tolist() for row in range(3)]
    assert allowed == [[3, 8], list(range(10)), [0, 1, 7, 9]]
    assert torch.where(found > -torch.inf, found, logits).equal(logits)


def test_penalties_leave_out_what_is_no_token():
    """A prompt's embeddings have the id -1; a row may have no token at all, and rows end at different lengths."""
    torch.manual_seed(0)
    logits = torch.randn(4, VOCABULARY)
    history = torch.tensor([[-1, 3, -1, 7, 7, 9], [-1, -1, -1, 5, -1, -1], [-1, -1, 4, 4, 4, 4], [2, -1, 8, 0, 0, 0]])
    known, prompt = torch.tensor([5, 4, 2, 3]), torch.tensor([3, 3, 2, 2])
    expected = logits.clone()
    for row, (length, begin) in enumerate(zip(known.tolist(), prompt.tolist(), strict=True)):
        seen, output = history[row, :length].tolist(), history[row, begin:length].tolist()
        for token in set(seen) - {-1}:
            factor = 1.7 if expected[row, token] < 0 else 1 / 1.7
            expected[row, token] *= factor
            expected[row, token] -= 0.3 * output.count(token) + 0.4 * (token in output)
    penalties = (torch.full((4, 1), value) for value in (1.7, 0.4, 0.3))
    assert torch.allclose(penalize(logits, history, known, prompt, *penalties), expected)
