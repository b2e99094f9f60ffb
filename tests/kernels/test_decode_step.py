"""The first and last kernel of a captured decode step, compared with plain indexing."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")

from minillm.kernels import decode_step
from minillm.runner.sampler import uniforms
from minillm.runner.sampling_columns import mix
from tests.chance import SEED

pytestmark = pytest.mark.explore

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


PARAMETERS = ("temperature", "min_p", "top_k", "top_p", "scored")


def state(rows: int = 6, longest: int = 40, blocks: int = 10, groups: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    random = lambda high, *size, dtype: torch.randint(0, high, size, generator=generator).to(dtype).to(DEVICE)  # noqa: E731
    seeds = np.random.default_rng(SEED).integers(-(2**63), 2**63 - 1, rows + 1)
    return {
        "tokens": random(1000, rows + 1, longest, dtype=torch.int32),
        "table": random(500, groups, rows + 1, blocks, dtype=torch.int32),
        "seed": torch.from_numpy(seeds).to(DEVICE),
        "parameters": torch.rand(rows + 1, 5, generator=generator).mul(9).round().to(DEVICE),
    }


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_prepare_looks_up_the_token_at_each_position(dtype):
    """Row 4 is there three times, as with two drafts; 6 is padding."""
    given, rows = state(), torch.tensor([4, 0, 6, 4, 4, 3], device=DEVICE)
    at = int32(11, 38, 5, 12, 13, 0).to(dtype)
    found = decode_step.prepare(rows, at, **given, block_size=4, width=9)
    for i, row in enumerate(rows.tolist()):
        if row == 6:
            assert found["lengths"][i] == 0 and (found["slots"][:, i] == -1).all()
            continue
        position = int(at[i])
        assert found["ids"][i] == given["tokens"][row, position]
        assert found["positions"][i] == position and found["lengths"][i] == position + 1
        for group in range(2):
            assert found["slots"][group, i] == given["table"][group, row, position // 4] * 4 + position % 4
            assert found["table"][group, i].tolist() == given["table"][group, row, :9].tolist()
        assert [found[name][i] for name in PARAMETERS] == given["parameters"][row].tolist()
    assert found["top_k"].dtype == found["scored"].dtype == torch.int32


def test_given_tokens_run_in_place_of_the_states():
    given, rows = state(), torch.tensor([4, 4, 4], device=DEVICE)
    tokens = torch.tensor([-1, 0, 77], device=DEVICE)
    found = decode_step.prepare(rows, int32(11, 12, 13), **given, block_size=4, width=9, host_tokens=tokens)
    assert found["ids"].tolist() == [int(given["tokens"][4, 11]), 0, 77]


def test_rows_that_sample_nothing_have_the_parameters_of_padding():
    given, rows, sampling = state(), torch.tensor([4, 0], device=DEVICE), torch.tensor([6, 0], device=DEVICE)
    found = decode_step.prepare(rows, int32(7, 3), **given, block_size=4, width=9, sampling=sampling)
    assert found["lengths"].tolist() == [8, 4]
    for i, row in enumerate((6, 0)):
        assert [found[name][i] for name in PARAMETERS] == given["parameters"][row].tolist()


def test_prepare_draws_the_samplers_own_random_numbers():
    given = state(rows=50)
    rows, positions = torch.arange(50, device=DEVICE), np.random.default_rng(SEED).integers(39, size=50)
    found = decode_step.prepare(rows, int32(*positions), **given, block_size=4, width=10)
    seeds = given["seed"][:50].cpu().numpy()
    assert found["uniform"].tolist() == uniforms(mix(seeds.astype(np.uint64)), positions + 1).tolist()


def test_advance_writes_the_tokens_back_and_leaves_other_rows_unchanged():
    given, rows, positions = state(), torch.tensor([5, 6, 1, 5], device=DEVICE), int32(20, 30, 17, 21)
    tokens = given["tokens"].clone()
    sampled, out = torch.tensor([11, 12, 13, -1], device=DEVICE), torch.full((4,), -7, device=DEVICE)
    arrived = torch.full((7, 4), -7, dtype=torch.int32)
    if DEVICE == "cuda":
        arrived = arrived.pin_memory()
    decode_step.advance(rows, sampled, positions, tokens, out, arrived)
    assert out.tolist() == [11, 12, 13, -1]
    expected = given["tokens"].clone()
    for row, place, token in ((5, 21, 11), (1, 18, 13), (5, 22, 0)):
        expected[row, place] = token
    assert torch.equal(tokens, expected) and positions.tolist() == [21, 30, 18, 22]
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    on_host = torch.full((7, 4), -7, dtype=torch.int32)
    for row, place, token in ((5, 21, 11), (1, 18, 13), (5, 22, -1)):
        on_host[row, place % 4] = token
    assert torch.equal(arrived, on_host)


def test_advance_writes_as_many_log_probabilities_to_the_host_as_a_row_has():
    given, rows, most = state(), torch.tensor([5, 6, 1], device=DEVICE), 3
    sampled, out = torch.tensor([11, 12, 13], device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    on_host = [torch.full((7, 4), -7, dtype=torch.int32)]
    on_host += [torch.full((7, 4, most), -7, dtype=dtype) for dtype in (torch.int32, torch.float32)]
    if DEVICE == "cuda":
        on_host = [each.pin_memory() for each in on_host]
    count = torch.tensor([2, 3, 0], dtype=torch.int32, device=DEVICE)
    ids = torch.arange(9, dtype=torch.int32, device=DEVICE).reshape(3, most)
    found = decode_step.ScoreBuffers(count, ids, ids / 4)
    decode_step.advance(rows, sampled, int32(6, 6, 6), given["tokens"], out, on_host[0], found, tuple(on_host[1:]))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    place = 7 % 4
    assert on_host[0][5, place] == 11
    assert on_host[1][5, place].tolist() == [0, 1, -7] and on_host[2][5, place].tolist() == [0.0, 0.25, -7.0]
    for each in on_host[1:]:
        each[5, place] = -7
        assert (each == -7).all(), "neither padding nor a row that asks for none"
