"""Wrong solutions of lesson 09: a pool with a prefix cache."""

from collections import OrderedDict

from minillm.kv_cache import OutOfBlocks
from tests.course.mutants import wrong
from tests.course.mutants.lesson_09 import Pool


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


@wrong("MyPrefixPool", fails="a block stays in use until its last holder releases it")
class FreesEveryBlockWithoutAKey(PrefixPool):
    """Assumes that a block that cannot be found has one holder."""

    def release(self, blocks):
        for block in reversed(blocks):
            self.references[block] = self.references[block] - 1 if block in self.key_of else 0
            if self.references[block] == 0:
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


@wrong("MyPrefixPool", fails="a cached block has a count of 0")
class CachedBlocksKeepACountOfOne(PrefixPool):
    """The last holder of a block with a key is not counted off, and the next one is not counted."""

    def share(self, blocks):
        for block in blocks:
            if block in self.idle:
                del self.idle[block]
            else:
                self.references[block] += 1

    def release(self, blocks):
        for block in reversed(blocks):
            if self.references[block] == 1 and block in self.key_of:
                self.idle[block] = None
            else:
                super().release([block])


@wrong("MyPrefixPool", fails="a key can be any value, even 0")
class CachesBlocksWithATrueKey(PrefixPool):
    def cache_or_free(self, block):
        if self.key_of.get(block):
            self.idle[block] = None
        else:
            self.free.append(block)


@wrong("MyPrefixPool", fails="a key can be any value, even 0")
class ForgetsTrueKeys(PrefixPool):
    def evict(self):
        block, _ = self.idle.popitem(last=False)
        if key := self.key_of.pop(block):
            del self.block_of[key]
        return block


@wrong("MyPrefixPool", fails="the lists passed in are not changed")
class SharesASortedList(PrefixPool):
    def share(self, blocks):
        blocks.sort()
        super().share(blocks)


@wrong("MyPrefixPool", fails="the end of a sequence is evicted before its beginning")
class CachesSixteenBlocks(PrefixPool):
    def release(self, blocks):
        super().release(blocks)
        while len(self.idle) > 16:
            self.free.append(self.evict())


@wrong("MyPrefixPool", fails="an empty list changes nothing")
class ReleasesTheLastBlockFirst(PrefixPool):
    def release(self, blocks):
        super().release([blocks[-1]])
        super().release(blocks[:-1])


@wrong("MyPrefixPool", fails="two pools know nothing of each other")
class OneListForAllPools(PrefixPool):
    """Caches blocks in a list of the class, which belongs to the newest pool."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        type(self).newest = self.idle

    def cache_or_free(self, block):
        if block in self.key_of:
            self.newest[block] = None
        else:
            self.free.append(block)


@wrong("MyPrefixPool", fails="the end of a sequence is evicted before its beginning")
class KeepsAtMostTwoHundredBlocks(PrefixPool):
    def release(self, blocks):
        super().release(blocks)
        while len(self.idle) > 200:
            self.free.append(self.evict())
