"""Sums over ranks that kernels compute through each other's inboxes.

Here both ranks' inboxes are in one memory, which must be filled before an interpreted kernel looks: the test sends the
other rank's part itself. `test_single_row_of_shards.py` runs all ranks.
"""

import threading

import pytest
import torch

from minillm.kernels import normalization, peers

ROWS, WIDTH, RANKS = 5, 96, 3


def words(numbers: torch.Tensor, epoch: torch.Tensor) -> torch.Tensor:
    """What a rank sends: two numbers of 16 bits in a word, where there is an even number of them."""
    pairs = numbers.element_size() == 2 and len(numbers) % 2 == 0
    bits = (numbers if pairs else numbers.float()).contiguous().view(torch.int32)
    return (epoch.long() << 32) | (bits.long() & 0xFFFFFFFF)


@pytest.fixture(autouse=True)
def on_device(device):
    """Make all tensors where kernels run."""
    with torch.device(device):
        yield


@pytest.fixture
def reducers():
    """Ranks' reducers, each with an inbox that holds nothing of use."""
    inboxes = [torch.full((2, RANKS, ROWS, WIDTH), -1, dtype=torch.int64) for _ in range(RANKS)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    return [
        peers.Reducer(rank, inboxes[rank], addresses, torch.zeros(ROWS, dtype=torch.int32)) for rank in range(RANKS)
    ]


def deliver(reducer, parts):
    """Put the other ranks' parts into a rank's inbox."""
    for rank, x in enumerate(parts):
        if rank == reducer.rank:
            continue
        for row in range(len(x)):
            epoch = reducer.epochs[row] + 1
            sent = words(x[row], epoch)
            reducer.inbox[int(epoch) & 1, rank, row, : len(sent)] = sent


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("columns", [80, 81])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_and_norms_are_those_of_all_parts_again_and_again(reducers, rows, columns, dtype):
    for step in range(2):  # two sums each, so the second overwrites what the first has left in the inboxes
        torch.manual_seed(step)
        parts = [torch.randn(rows, columns).to(dtype) for _ in range(RANKS)]
        residual, norm = torch.randn(rows, columns).to(dtype), torch.rand(columns)
        summed = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)
        for reducer in reducers:
            deliver(reducer, parts)
            found = reducer.all_reduce(parts[reducer.rank])
            torch.testing.assert_close(found, summed)  # an interpreted kernel cuts off digits that bfloat16 has not
            deliver(reducer, parts)
            normed, total = reducer.add_rms_norm(parts[reducer.rank], residual, norm, 1e-6)
            wanted, wanted_total = normalization.add_rms_norm(found, residual, norm, 1e-6)
            assert torch.equal(total, wanted_total)
            torch.testing.assert_close(normed, wanted)
    assert reducers[0].epochs[:rows].tolist() == [4] * rows and not reducers[0].epochs[rows:].any()


def test_parts_are_added_in_the_order_of_ranks(reducers):
    """In float32, 1e8 - 1e8 + 1 is 1, and 1 - 1e8 + 1e8 is 0."""
    parts = [torch.full((1, 8), number) for number in (1e8, -1e8, 1.0)]
    for reducer in reducers:
        deliver(reducer, parts)
        assert (reducer.all_reduce(parts[reducer.rank]) == 1).all()


def test_a_reader_waits_for_the_epoch(reducers):
    """The last step's words are still there when a kernel looks for the first time."""
    reducer, x = reducers[0], torch.ones(1, 8)
    for _ in range(2):
        deliver(reducer, [x, x, x])
        reducer.all_reduce(x)

    def arrive():
        stream = torch.cuda.Stream() if x.is_cuda else None  # not behind the kernel that waits
        with torch.cuda.stream(stream), torch.device(x.device):
            deliver(reducer, [x, 2 * x, 3 * x])

    threading.Timer(0.5, arrive).start()
    assert torch.equal(reducer.all_reduce(x), 6 * x)


def test_two_numbers_of_16_bits_share_a_word(reducers):
    reducer, x = reducers[1], torch.randn(2, 70).bfloat16()
    deliver(reducer, [x, x, x])
    reducer.all_reduce(x)
    assert torch.equal(reducers[2].inbox[1, 1, 1, :35], words(x[1], torch.tensor(1)))
    assert (reducers[2].inbox[:, 1, :, 35:] == -1).all()


def test_a_part_is_sent_to_every_other_rank_with_the_epoch_of_its_row(reducers):
    reducer, x = reducers[1], torch.randn(2, 70)
    reducer.epochs[:] = torch.tensor([6, -(1 << 31), 0, 0, 0])  # the second has counted 2^31 sums
    deliver(reducer, [x, x, x])
    reducer.all_reduce(x)
    assert (reducer.inbox[:, 1] == -1).all(), "its own part stays where it is"
    for other in (reducers[0], reducers[2]):
        assert torch.equal(other.inbox[1, 1, 0, :70], words(x[0], torch.tensor(7)))
        assert torch.equal(other.inbox[1, 1, 1, :70], words(x[1], torch.tensor(1 - (1 << 31))))
        assert (other.inbox[:, 1, :, 70:] == -1).all() and (other.inbox[0, 1] == -1).all()


@pytest.mark.parametrize(("shape", "dtype", "fits"), [
    ((5, 96), torch.float32, True), ((0, 96), torch.bfloat16, True), ((6, 96), torch.float32, False),
    ((5, 97), torch.float32, False), ((5, 192), torch.bfloat16, True), ((5, 193), torch.float16, False),
    ((5, 97), torch.float16, False), ((1, 1, 8), torch.float32, False), ((2, 8), torch.float64, False),
])  # fmt: skip
def test_it_takes_what_fits_its_inboxes_and_words(reducers, shape, dtype, fits):
    assert reducers[0].takes(torch.zeros(shape, dtype=dtype)) == fits


def test_no_rows_are_no_launch(reducers):
    assert reducers[0].all_reduce(torch.zeros(0, 96)).shape == (0, 96)


def test_an_embedding_is_sent_by_the_rank_that_has_it_and_begins_an_epoch():
    torch.manual_seed(0)
    table, inbox = torch.randn(20, 80), torch.zeros(2, 80, dtype=torch.int64)
    for step, token in enumerate((3, 19, 10), 1):
        for rank in range(2):
            outbox = peers.Outbox(torch.tensor([inbox.data_ptr()]), torch.tensor([step - 1]).int(), rank * 80)
            own = table[rank * 10 : rank * 10 + 10]
            peers.send_embedding(torch.tensor([token]), own, 3.0, rank * 10, outbox)
            assert int(outbox.epoch) == step
            wanted = 3 * table[token] if token // 10 == rank else torch.zeros(80)
            assert torch.equal(inbox[rank], words(wanted, torch.tensor(step)))
        assert torch.equal(peers.summed(inbox, outbox, 80, torch.float32, first=True)[0], 3 * table[token])
