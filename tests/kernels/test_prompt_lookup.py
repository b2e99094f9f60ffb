"""The kernels that draft on the device, and their references in PyTorch, find what the host's prompt lookup finds."""

import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")

from minillm.kernels import prompt_lookup
from minillm.kernels.prompt_lookup import FOUND, RunningTokens
from minillm.prompts import EMBEDDED
from minillm.runner import device_drafts
from minillm.speculation import Asked, NgramProposer
from minillm.speculation.ngram import SIZES
from tests.chance import SEED

pytestmark = pytest.mark.explore

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONGEST, MOST, UNTOUCHED = 90, 6, -77


def int64(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def histories(count: int, seed: int) -> tuple[torch.Tensor, list[int]]:
    """Rows of tokens, and their lengths. After these are tokens that would continue the row, and other rows' ones."""
    rng = random.Random(SEED + seed)
    tokens, lengths = np.zeros((count, LONGEST), np.int32), []
    for row in range(count):
        period, alphabet = rng.choice([3, 11, 40]), rng.choice([2, 4, 60])
        pattern = [rng.randrange(alphabet) for _ in range(period)]
        tokens[row] = [pattern[i % period] if rng.random() < 0.9 else rng.randrange(alphabet) for i in range(LONGEST)]
        tokens[row, : rng.choice([0, 0, 9])] = EMBEDDED
        lengths.append(rng.choice([1, 2, 3, rng.randint(4, LONGEST - MOST), LONGEST - MOST]))
    return torch.from_numpy(tokens).to(DEVICE), lengths


def by_host(tokens: torch.Tensor, length: int, count: int) -> list[int]:
    """What the host would draft."""
    return NgramProposer().propose([Asked("r", tokens[:length].cpu().numpy(), count)])[0] if count else []


def looked_up(tokens, rows, counts, host_lengths, lengths, size) -> RunningTokens:
    """Run the kernel for these rows, one after the other, with padding at the end."""
    entries = torch.full((3, size), -1, dtype=torch.int64, device=DEVICE)
    entries[0] = len(tokens) - 1
    at = 0
    for row, count, length in zip(rows, counts, host_lengths, strict=True):
        entries[0, at : at + 1 + count] = row
        entries[1, at], entries[2, at] = count, length
        at += 1 + count
    running = RunningTokens(*torch.full((3, size), UNTOUCHED, dtype=torch.int64, device=DEVICE).unbind())
    prompt_lookup.look_up(*entries.unbind(), lengths, tokens, MOST, running)
    assert (entries[2] == -1).all(), "from now on the device knows the lengths"
    return running


def test_the_kernel_names_the_sizes_that_the_host_has():
    assert SIZES == (8, 4, 2) and device_drafts.FOUND == FOUND


@pytest.mark.parametrize("seed", range(3))
def test_the_device_finds_the_drafts_that_the_host_finds(seed, monkeypatch):
    """In a tile of 16 positions, so that the newest of the longest n-grams is found in any of several."""
    monkeypatch.setattr(prompt_lookup, "TILE", 16)
    tokens, own = histories(13, seed)
    rng, padding = random.Random(SEED + seed), len(tokens) - 1
    rows = rng.sample(range(padding), 10)
    counts = [rng.choice([0, 1, MOST, MOST]) for _ in rows]
    host = [rng.random() < 0.5 for _ in rows]  # whether the host gives the length
    lengths = torch.tensor([1 if row in np.array(rows)[host] else own[row] for row in range(13)], dtype=torch.int32)
    host_lengths = [own[row] if known else -1 for row, known in zip(rows, host, strict=True)]
    size = sum(counts) + len(rows) + 5
    running = looked_up(tokens, rows, counts, host_lengths, lengths.to(DEVICE), size)

    reference = device_drafts.look_up(tokens[rows], int64(*(own[row] for row in rows)), int64(*counts), MOST).tolist()
    at = found = 0
    for row, count, again in zip(rows, counts, reference, strict=True):
        expected, length = by_host(tokens[row], own[row], count), own[row]
        found += len(expected)
        assert [each for each in again if each >= 0] == expected and again == sorted(again, key=lambda each: each < 0)
        drafts = expected + [-1] * (count - len(expected))
        assert running.host_tokens[at : at + 1 + count].tolist() == [-1, *drafts]
        real = [row if each >= 0 else padding for each in drafts]
        assert running.rows[at : at + 1 + count].tolist() == [row, *real]
        assert running.positions[at : at + 1 + count].tolist() == list(range(length - 1, length + count))
        at += 1 + count
    assert found >= 5 and (running.rows[at:] == padding).all() and (running.host_tokens[at:] == -1).all()


@pytest.mark.parametrize(
    ("row", "length", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 9, 9], 6, [3, 4, 1]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 8, [4, 1, 2]),  # the newest
        ([9, 9, 5, 8, 9, 6, 9, 9, 5, 8, 9], 11, [6, 9, 9]),  # the longest
        ([7, 7, 7, 7], 2, []),  # an n-gram does not follow itself, and what is past the end is not the row's
        ([7, 7, 7, 5], 3, [7, 7, 7]),
        ([5, 5, 5], 1, []),
        ([1, 2, EMBEDDED, 1, 2], 5, []),
        ([1, 2, 3, EMBEDDED, 1, 2], 6, [3]),
    ],
)
def test_drafts_are_what_followed(row, length, expected):
    tokens = torch.tensor([row, [1, 2, 8, 1, 2, *row][: len(row)], [0] * len(row)], dtype=torch.int32, device=DEVICE)
    running = looked_up(tokens, [0], [3], [length], torch.zeros(3, dtype=torch.int32, device=DEVICE), 4)
    assert [each for each in running.host_tokens[1:].tolist() if each >= 0] == expected
    reference = device_drafts.look_up(tokens[:1], int64(length), int64(3), 3)[0].tolist()
    assert [each for each in reference if each >= 0] == expected


def test_drafts_count_until_the_first_that_is_wrong():
    """Rows 4, 0, 2 and 3, and padding. The tokens of one row are no drafts of the next one."""
    drafts = [[5, 6, 7], [8, 9], [], [3, 3, -1]]
    sampled = [[5, 6, 1, 5], [1, 9, 1], [5], [3, 3, 3, 3]]
    expected, rows, before = [3, 1, 1, 3], [4, 0, 2, 3], [10, 40, 3, 31]
    counts, padding = [len(each) for each in drafts], 5
    size = sum(counts) + len(rows) + 2
    inputs = torch.full((2, size), -1, dtype=torch.int64, device=DEVICE)
    inputs[0] = padding
    running = RunningTokens(*torch.full((3, size), -1, dtype=torch.int64, device=DEVICE).unbind())
    out = int64(*[each for row in sampled for each in row], 0, 0)
    at = 0
    for row, length, each in zip(rows, before, drafts, strict=True):
        inputs[0, at : at + 1 + len(each)], inputs[1, at] = row, len(each)
        running.positions[at : at + 1 + len(each)] = torch.arange(length, length + 1 + len(each))
        running.host_tokens[at + 1 : at + 1 + len(each)] = int64(*each)
        at += 1 + len(each)
    lengths = torch.full((6,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    accepted = torch.full((6, 32), UNTOUCHED, dtype=torch.int32)
    if DEVICE == "cuda":
        accepted = accepted.pin_memory()
    prompt_lookup.accept(*inputs.unbind(), running, out, lengths, accepted, MOST)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    found = [sum(token >= 0 for token in each) for each in drafts]
    assert lengths[rows].tolist() == [a + b for a, b in zip(before, expected, strict=True)]
    assert [accepted[row, length % 32] for row, length in zip(rows, before, strict=True)] == [
        FOUND * a + b for a, b in zip(found, expected, strict=True)
    ]
    assert (accepted != UNTOUCHED).sum() == 4 and lengths[1] == lengths[5] == UNTOUCHED
    padded = torch.tensor([each + [-1] * (3 - len(each)) for each in drafts])
    yielded = torch.tensor([each + [0] * (4 - len(each)) for each in sampled])
    assert device_drafts.accept(padded, yielded).tolist() == expected


def test_the_device_draws_the_numbers_that_the_host_draws():
    from minillm.runner.sampler import uniforms
    from minillm.runner.sampling_columns import mix

    seeds = np.random.default_rng(SEED).integers(-(2**63), 2**63 - 1, 200)
    positions = np.random.default_rng(SEED + 1).integers(0, 1 << 20, 200)
    found = device_drafts.uniforms(torch.from_numpy(seeds), torch.from_numpy(positions)).numpy()
    assert found.dtype == np.float32 and np.array_equal(found, uniforms(mix(seeds.astype(np.uint64)), positions))
