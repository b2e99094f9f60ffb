"""Every token of a block is stored by one device, in a part that is smaller by their number."""

import pytest
import torch

from minillm.kv_cache.layer_cache import CacheSpec, LayerCache
from minillm.kv_cache.split_pages import BlockShare

CPU = torch.device("cpu")
SHARES = [BlockShare(index, 3) for index in range(3)]


def test_each_slot_is_one_devices():
    slots = torch.tensor([-1, *range(4 * 6)])
    found = torch.stack([share.slots(slots) for share in SHARES])
    assert (found[:, 0] == -1).all() and (((found >= 0).sum(0) == 1)[1:]).all()
    held = [set(part[part >= 0].tolist()) for part in found]
    assert held == [set(range(4 * 2))] * 3, "each has all slots of blocks of 2, for blocks of 6"
    assert BlockShare(0, 1).slots(slots) is slots


@pytest.mark.parametrize("name", ["auto", "int8", "fp8"])
def test_devices_store_what_one_would(name):
    whole = CacheSpec.of(name, 1, 8, torch.float32)
    one = whole.allocate(4, 6, CPU)
    k, v, slots = torch.randn(9, 1, 8), torch.randn(9, 1, 8), torch.randperm(24)[:9]
    one.write(k, v, slots)
    parts = []
    for share in SHARES:
        spec = share.spec(whole)
        assert spec.name == whole.name and spec.bytes_per_token * 3 - whole.bytes_per_token in range(3)
        parts.append(spec.allocate(4, 6, CPU))
        parts[-1].write(k, v, share.slots(slots))
        assert parts[-1].k.shape == (4, 2, 1, 8)
    blocks = torch.arange(4)[None]
    read = [part.read(blocks) for part in parts]
    together = (torch.stack(each, 2).flatten(1, 2) for each in zip(*read, strict=True))
    for found, wanted in zip(together, one.read(blocks), strict=True):
        assert found.equal(wanted)


def test_one_device_has_whole_blocks():
    whole = CacheSpec.of("auto", 1, 8, torch.float32)
    assert BlockShare(0, 1).spec(whole) is whole and type(whole.allocate(1, 4, CPU)) is LayerCache


def test_the_tokens_of_a_row_are_counted():
    lengths = torch.arange(8)
    assert torch.stack([share.held(lengths) for share in SHARES]).sum(0).equal(lengths)
    assert SHARES[1].held(lengths).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
