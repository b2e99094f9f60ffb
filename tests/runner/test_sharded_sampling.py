"""Tokens sampled from logits that are divided between ranks are those of all logits together."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from minillm.ops import reference
from minillm.runner import sharded_sampling
from tests.model.test_parallel import ranks

VOCABULARY, ROWS = 48, 400


def sampled(logits, size, *more) -> list[torch.Tensor]:
    """What each of `size` ranks finds."""
    with ThreadPoolExecutor(size) as pool:
        parts = logits.chunk(size, -1)
        return [*pool.map(lambda rank: sharded_sampling.sample(rank, parts[rank.rank], *more), ranks(size))]


@pytest.fixture
def logits():
    """Rows with one likely token, with many, with equal ones, with -inf, and without probabilities."""
    made = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made *= torch.logspace(-2, 2, ROWS, dtype=torch.float64)[:, None]
    made[:40] = made[:40].round()
    made[40:60, :24] = -torch.inf
    made[60:70] = -torch.inf
    made[70:80, 30] = torch.nan
    made[80:90, 3] = torch.inf
    return made


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_find_the_likeliest_token(logits, size):
    for found in sampled(logits, size):
        torch.testing.assert_close(found, reference.likeliest(logits), rtol=0, atol=0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_draw_the_token_of_the_same_number(logits, size):
    rng = np.random.default_rng(1)
    uniform = torch.from_numpy(rng.random(ROWS, np.float32))
    temperature = torch.from_numpy(rng.choice([0, 0.5, 1, 3], ROWS).astype(np.float32))
    uniform[:2], temperature[:4] = 0, 1
    uniform[2:4] = 1 - 2**-24
    expected = reference.sample(logits, temperature, uniform)
    assert len(expected.unique()) > 40 and (expected[60:90] == -1).all()
    for found in sampled(logits, size, temperature, uniform):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
