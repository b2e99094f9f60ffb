"""Wrong solutions of lesson 09: a block pool, a pool with a prefix cache."""

from collections import OrderedDict

from minillm.kv_cache import OutOfBlocks
from tests.course.mutants import wrong

# ---- MyBlockPool


class Pool:
    """A correct pool, the base of the wrong ones."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))

    @property
    def available(self):
        return len(self.free)

    def allocate(self, count):
        if count > self.available:
            raise OutOfBlocks(f"{count} asked for")
        blocks = [self.free.pop() for _ in range(count)]
        for block in blocks:
            self.references[block] = 1
        return blocks

    def share(self, blocks):
        for block in blocks:
            self.references[block] += 1

    def release(self, blocks):
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free.append(block)


@wrong("MyBlockPool", fails="released blocks can be allocated again")
class Leaks(Pool):
    """Blocks that never had a second holder are not freed."""

    def release(self, blocks):
        for block in blocks:
            shared = self.references[block] > 1 or block in self.__dict__.setdefault("once_shared", set())
            self.references[block] -= 1
            if shared and self.references[block] == 0:
                self.free.append(block)

    def share(self, blocks):
        super().share(blocks)
        self.__dict__.setdefault("once_shared", set()).update(blocks)


@wrong("MyBlockPool", fails="a block with a holder is not allocated again")
class RingBuffer(Pool):
    """Allocates the next blocks in memory, assuming that requests finish in order of arrival."""

    next = 0

    @property
    def available(self):
        return self.references.count(0)

    def allocate(self, count):
        if count > self.available:
            raise OutOfBlocks(f"{count} asked for")
        blocks = [(self.next + i) % self.num_blocks for i in range(count)]
        self.next += count
        for block in blocks:
            self.references[block] = 1
        return blocks


@wrong("MyBlockPool", fails="a block becomes free when its last holder releases it, and not before")
class FirstHolderFrees(Pool):
    def release(self, blocks):
        for block in blocks:
            if self.references[block]:
                self.references[block] = 0
                self.free.append(block)


@wrong("MyBlockPool", fails="a block becomes free when its last holder releases it, and not before")
class FlagInsteadOfCount(Pool):
    """A flag instead of a count: a third holder is not noticed."""

    def share(self, blocks):
        for block in blocks:
            self.references[block] = 2


@wrong("MyBlockPool", fails="a request for too many blocks is refused, and takes none")
class AllocatesBeforeRaising(Pool):
    def allocate(self, count):
        blocks = []
        for _ in range(count):
            if not self.free:
                raise OutOfBlocks("none left")
            blocks.append(self.free.pop())
            self.references[blocks[-1]] = 1
        return blocks


@wrong("MyBlockPool", fails="a request for too many blocks is refused, and takes none")
class CountsBeforeRaising(Pool):
    def allocate(self, count):
        blocks = self.free[max(len(self.free) - count, 0) :]
        for block in blocks:
            self.references[block] = 1
        if count > self.available:
            raise OutOfBlocks(f"{count} asked for")
        return super().allocate(count)


@wrong("MyBlockPool", fails="a request for too many blocks is refused, and takes none")
class RefusesWithAnAssertion(Pool):
    def allocate(self, count):
        assert count <= self.available, "not enough"
        return super().allocate(count)


@wrong("MyBlockPool", fails="allocate(0) takes no block")
class SlicesFromTheEnd(Pool):
    def allocate(self, count):
        if count > self.available:
            raise OutOfBlocks(f"{count} asked for")
        blocks = self.free[-count:]
        del self.free[-count:]
        for block in blocks:
            self.references[block] = 1
        return blocks


@wrong("MyBlockPool", fails="every block of a list has its own count")
class SharesOnlyTheFirstBlock(Pool):
    def share(self, blocks):
        self.references[blocks[0]] += 1


@wrong("MyBlockPool", fails="every block of a list has its own count")
class OneCountForTheWholeList(Pool):
    def share(self, blocks):
        most = max((self.references[block] for block in blocks), default=0)
        for block in blocks:
            self.references[block] = most + 1


@wrong("MyBlockPool", fails="every block of a list has its own count")
class FreesAListAsAWhole(Pool):
    def release(self, blocks):
        for block in blocks:
            self.references[block] -= 1
        if blocks and all(self.references[block] == 0 for block in blocks):
            self.free.extend(blocks)


@wrong("MyBlockPool", fails="the whole pool can be allocated")
class KeepsOneBlockBack(Pool):
    def allocate(self, count):
        if count and count >= self.available:
            raise OutOfBlocks(f"{count} asked for")
        return super().allocate(count)


@wrong("MyBlockPool", fails="the lists passed in are not changed")
class EmptiesTheCallersList(Pool):
    def release(self, blocks):
        while blocks:
            super().release([blocks.pop()])


@wrong("MyBlockPool", fails="`references` holds the counts")
class FreeBlocksKeepACountOfOne(Pool):
    def release(self, blocks):
        for block in blocks:
            if self.references[block] == 1:
                self.free.append(block)
            else:
                self.references[block] -= 1


# ---- MyPrefixPool


class PrefixPool(Pool):
    """A correct pool, the base of the wrong ones."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.idle = OrderedDict()
        self.block_of = {}
        self.key_of = {}

    @property
    def available(self):
        return len(self.free) + len(self.idle)

    def allocate(self, count):
        if count > self.available:
            raise OutOfBlocks(f"{count} asked for")
        blocks = [self.free.pop() if self.free else self.evict() for _ in range(count)]
        for block in blocks:
            self.references[block] = 1
        return blocks

    def register(self, block, key):
        if key not in self.block_of and block not in self.key_of:
            self.block_of[key], self.key_of[block] = block, key

    def lookup(self, keys):
        blocks = []
        for key in keys:
            if key not in self.block_of:
                break
            blocks.append(self.block_of[key])
        return blocks

    def share(self, blocks):
        for block in blocks:
            self.idle.pop(block, None)
            self.references[block] += 1

    def release(self, blocks):
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self.cache_or_free(block)

    def cache_or_free(self, block):
        if block in self.key_of:
            self.idle[block] = None
        else:
            self.free.append(block)

    def evict(self):
        block, _ = self.idle.popitem(last=False)
        if block in self.key_of:
            del self.block_of[self.key_of.pop(block)]
        return block


@wrong("MyPrefixPool", fails="blocks without a key are reused first")
class KeepsEverything(PrefixPool):
    def cache_or_free(self, block):
        self.idle[block] = None


@wrong("MyPrefixPool", fails="the least recently used block is evicted first")
class EvictsTheNewest(PrefixPool):
    """Releases blocks in the other order, so the end of a sequence is still evicted before its beginning."""

    def release(self, blocks):
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self.cache_or_free(block)

    def evict(self):
        block, _ = self.idle.popitem(last=True)
        del self.block_of[self.key_of.pop(block)]
        return block


@wrong("MyPrefixPool", fails="the end of a sequence is evicted before its beginning")
class EvictsTheBeginningFirst(PrefixPool):
    def release(self, blocks):
        super().release(blocks[::-1])


@wrong("MyPrefixPool", fails="a cached block that is shared again is in use")
class KeepsSharedBlocksEvictable(PrefixPool):
    """A shared block leaves the LRU list only when it is released again."""

    def share(self, blocks):
        for block in blocks:
            self.references[block] += 1

    def cache_or_free(self, block):
        self.idle.pop(block, None)
        super().cache_or_free(block)


@wrong("MyPrefixPool", fails="an evicted block can no longer be found")
class OldKeysStay(PrefixPool):
    """The block forgets its key, but looking up the key still finds the block."""

    def evict(self):
        block, _ = self.idle.popitem(last=False)
        self.key_of.pop(block)
        return block


@wrong("MyPrefixPool", fails="an evicted block can no longer be found")
class BlockKeepsItsKey(PrefixPool):
    def evict(self):
        block, _ = self.idle.popitem(last=False)
        del self.block_of[self.key_of[block]]
        return block


@wrong("MyPrefixPool", fails="a block stays in use until its last holder releases it")
class CachesEveryBlockWithAKey(PrefixPool):
    """Forgets to look at the count of a block that has a key."""

    def release(self, blocks):
        for block in reversed(blocks):
            self.references[block] -= 1
            if block in self.key_of or self.references[block] == 0:
                self.cache_or_free(block)


@wrong("MyPrefixPool", fails="the end of a sequence is evicted before its beginning")
class SortsByNumber(PrefixPool):
    """Takes the order in memory for the order of the tokens."""

    def release(self, blocks):
        super().release(sorted(blocks))


@wrong("MyPrefixPool", fails="a cached block that is shared again is in use")
class DoesNotCountCachedBlocks(PrefixPool):
    """Takes a cached block out of the list, but counts only blocks that were in use."""

    def share(self, blocks):
        for block in blocks:
            if block in self.idle:
                del self.idle[block]
            else:
                self.references[block] += 1


@wrong("MyPrefixPool", fails="a cached block that is shared again is in use")
class SharesTheOldest(PrefixPool):
    """Takes a block out of `idle`, but not the one that is shared."""

    def share(self, blocks):
        for block in blocks:
            self.references[block] += 1
            if block in self.idle:
                self.idle.popitem(last=False)


@wrong("MyPrefixPool", fails="every block of a list has its own count")
class JudgesAListByItsLastBlock(PrefixPool):
    def release(self, blocks):
        for block in blocks:
            self.references[block] -= 1
        if blocks and self.references[blocks[-1]] == 0:
            for block in reversed(blocks):
                self.cache_or_free(block)


@wrong("MyPrefixPool", fails="every block of a list has its own count")
class JudgesAListByItsFirstBlock(PrefixPool):
    def release(self, blocks):
        for block in blocks:
            self.references[block] -= 1
        if blocks and self.references[blocks[0]] == 0:
            for block in reversed(blocks):
                self.cache_or_free(block)


@wrong("MyPrefixPool", fails="every block of a list has its own count")
class SharesCachedListsOnly(PrefixPool):
    """Takes blocks out of `idle` only if the whole list is there."""

    def share(self, blocks):
        if all(block in self.idle for block in blocks):
            for block in blocks:
                del self.idle[block]
        for block in blocks:
            self.references[block] += 1


@wrong("MyPrefixPool", fails="`references` holds the counts")
class CountsToTwo(PrefixPool):
    def share(self, blocks):
        for block in blocks:
            self.idle.pop(block, None)
            self.references[block] = min(2, self.references[block] + 1)


@wrong("MyPrefixPool", fails="the other cached blocks are still found")
class ForgetsTheOldestKey(PrefixPool):
    """The key that was registered first need not be the evicted block's."""

    def evict(self):
        block, _ = self.idle.popitem(last=False)
        del self.block_of[next(iter(self.block_of))]
        del self.key_of[block]
        return block


@wrong("MyPrefixPool", fails="the other cached blocks are still found")
class ForgetsAllKeys(PrefixPool):
    def evict(self):
        block, _ = self.idle.popitem(last=False)
        self.block_of.clear()
        self.key_of.clear()
        return block


@wrong("MyPrefixPool", fails="the lists passed in are not changed")
class ReversesTheCallersList(PrefixPool):
    def release(self, blocks):
        blocks.reverse()
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self.cache_or_free(block)
