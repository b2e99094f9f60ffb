"""The first and last kernel of a captured decode step, compared with plain indexing."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")

from minillm.kernels import decode_step
from minillm.runner.sampler import uniforms
from tests.chance import SEED

pytestmark = pytest.mark.explore

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def state(rows: int = 6, longest: int = 40, blocks: int = 10, groups: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    random = lambda high, *size, dtype: torch.randint(0, high, size, generator=generator).to(dtype).to(DEVICE)  # noqa: E731
    seeds = np.random.default_rng(SEED).integers(-(2**63), 2**63 - 1, rows + 1)
    return {
        "position": random(longest - 1, rows + 1, dtype=torch.int32),
        "tokens": random(1000, rows + 1, longest, dtype=torch.int32),
        "table": random(500, groups, rows + 1, blocks, dtype=torch.int32),
        "seed": torch.from_numpy(seeds).to(DEVICE),
        "parameters": torch.rand(rows + 1, 4, generator=generator).mul(9).round().to(DEVICE),
    }


def test_prepare_looks_up_each_rows_next_step():
    given, rows = state(), torch.tensor([4, 0, 6, 3], device=DEVICE)  # 6 is padding
    found = decode_step.prepare(rows, **given, block_size=4, width=9)
    for i, row in enumerate(rows.tolist()):
        if row == 6:
            assert found["lengths"][i] == 0 and (found["slots"][:, i] == -1).all()
            continue
        position = int(given["position"][row])
        assert found["ids"][i] == given["tokens"][row, position]
        assert found["positions"][i] == position and found["lengths"][i] == position + 1
        for group in range(2):
            assert found["slots"][group, i] == given["table"][group, row, position // 4] * 4 + position % 4
            assert found["table"][group, i].tolist() == given["table"][group, row, :9].tolist()
        sampling = [found[name][i] for name in ("temperature", "min_p", "top_k", "top_p")]
        assert sampling == given["parameters"][row].tolist() and found["top_k"].dtype == torch.int32


def test_prepare_draws_the_samplers_own_random_numbers():
    given = state(rows=50)
    rows = torch.arange(50, device=DEVICE)
    found = decode_step.prepare(rows, **given, block_size=4, width=10)
    seeds, positions = given["seed"][:50].cpu().numpy(), given["position"][:50].cpu().numpy()
    assert found["uniform"].tolist() == uniforms(seeds, positions + 1).tolist()


def test_advance_writes_the_tokens_back_and_leaves_other_rows_unchanged():
    given, rows = state(), torch.tensor([5, 6, 1], device=DEVICE)
    tokens, position = given["tokens"].clone(), given["position"].clone()
    sampled, out = torch.tensor([11, 12, 13], device=DEVICE), torch.full((3,), -7, device=DEVICE)
    arrived = torch.full((7, 4), -7, dtype=torch.int32)
    if DEVICE == "cuda":
        arrived = arrived.pin_memory()
    decode_step.advance(rows, sampled, position, tokens, out, arrived)
    assert out.tolist() == [11, 12, 13]
    expected, moved = given["tokens"].clone(), given["position"].clone()
    for row, token in ((5, 11), (1, 13)):
        expected[row, int(given["position"][row]) + 1] = token
        moved[row] += 1
    assert torch.equal(tokens, expected) and torch.equal(position, moved)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    on_host = torch.full((7, 4), -7, dtype=torch.int32)
    for row, token in ((5, 11), (1, 13)):
        on_host[row, int(moved[row]) % 4] = token
    assert torch.equal(arrived, on_host)
