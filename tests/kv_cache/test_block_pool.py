"""The engine's block pool has the properties that lesson 09 requires, and evicts cached blocks in LRU order."""

import numpy as np
import pytest

from minillm.course.shared import checks
from minillm.kv_cache import BlockPool, prefix_keys

pytestmark = pytest.mark.key

PROPERTIES = [
    pytest.param(each, id=f"{name}: {each.name}")
    for name in ("MyBlockPool", "MyPrefixPool")
    for each in checks.find(name).properties
]


@pytest.mark.parametrize("wanted", PROPERTIES)
def test_the_engines_pool_has_the_properties_the_exercises_require(wanted):
    assert wanted.holds(BlockPool) is not False, wanted.hint


@pytest.fixture
def pool() -> BlockPool:
    """Six blocks: 0 to 3 cached one by one, in that order, 4 and 5 free."""
    pool = BlockPool(6)
    blocks = pool.allocate(4)
    assert blocks == [0, 1, 2, 3]
    for block in blocks:
        pool.register(block, bytes([block]))
        pool.release([block])
    return pool


def test_free_blocks_are_allocated_before_cached_ones(pool):
    assert sorted(pool.allocate(2)) == [4, 5] and pool.cached == 4


def test_cached_blocks_are_evicted_least_recently_used_first(pool):
    pool.allocate(2)
    assert [pool.allocate(1) for _ in range(4)] == [[0], [1], [2], [3]]


def test_allocating_many_blocks_evicts_in_the_same_order_and_reports_each_eviction(pool):
    evicted = []
    pool.watch_evictions(evicted.append)
    assert pool.allocate(5)[2:] == [0, 1, 2] == evicted and pool.lookup([bytes([3])]) == [3]


def test_sharing_a_cached_block_makes_it_the_most_recently_used(pool):
    pool.share([0])
    pool.release([0])
    pool.allocate(2)
    assert [pool.allocate(1) for _ in range(4)] == [[1], [2], [3], [0]]


def test_looking_up_a_prefix_without_sharing_it_keeps_the_eviction_order(pool):
    assert pool.lookup([bytes([0])]) == [0]
    pool.allocate(2)
    assert pool.allocate(1) == [0]


def test_a_prefix_key_depends_on_its_block_on_all_before_it_and_on_the_salt():
    tokens = np.arange(9, dtype=np.int32)
    keys = prefix_keys(tokens, 4)
    assert len(keys) == 2 and keys == prefix_keys(tokens[:8], 4) == prefix_keys(tokens, 4, known=keys[:1])
    first, last = tokens.copy(), tokens.copy()
    first[0] = last[7] = 50
    assert not set(keys) & set(prefix_keys(first, 4))
    assert [a == b for a, b in zip(keys, prefix_keys(last, 4), strict=True)] == [True, False]
    assert not set(keys) & set(prefix_keys(tokens, 4, ("tenant",)))


def test_prefix_keys_continue_from_the_last_one_known():
    tokens = np.arange(16, dtype=np.int32)
    keys = prefix_keys(tokens, 4)
    assert all(prefix_keys(tokens, 4, known=keys[:known]) == keys for known in range(5))


def test_of_the_blocks_of_a_list_those_that_are_cached_are_told(pool):
    (used,) = pool.allocate(1)
    assert pool.are_cached([3, used, 0]) == [True, False, True] and pool.unreferenced([3, used, 0]) == 2


def test_a_forgotten_block_can_be_registered_again_whether_it_was_cached_or_used(pool):
    """A failed request's blocks are forgotten; they may later hold other prefixes."""
    (used,) = pool.allocate(1)
    pool.register(used, b"used")
    pool.forget([0, used])
    assert pool.lookup([bytes([0])]) == pool.lookup([b"used"]) == [] and pool.cached == 3
    pool.check([used])
    pool.register(used, b"again")
    assert pool.lookup([b"again"]) == [used]
    pool.forget()
    assert pool.cached == 0 and pool.lookup([b"again"]) == []
    pool.check([used])
    pool.release([used])
    assert len(pool.allocate(6)) == 6
