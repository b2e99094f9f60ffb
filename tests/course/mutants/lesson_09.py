"""Wrong solutions of lesson 09: a block pool."""

from minillm.kv_cache import OutOfBlocks
from tests.course.mutants import wrong


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
        for block in blocks[:1]:
            self.references[block] += 1


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


@wrong("MyBlockPool", fails="`references` holds the counts")
class CountsTheFirstBlocks(Pool):
    """Sets as many counts as there are blocks, but those of the first blocks of the memory."""

    def allocate(self, count):
        if count > self.available:
            raise OutOfBlocks(f"{count} asked for")
        blocks = [self.free.pop() for _ in range(count)]
        for number in range(len(blocks)):
            self.references[number] = 1
        return blocks


@wrong("MyBlockPool", fails="a block with a holder is not allocated again")
class NumbersByHowManyAreUsed(Pool):
    """Takes the blocks in use for the first ones in memory."""

    def allocate(self, count):
        if count > self.available:
            raise OutOfBlocks(f"{count} asked for")
        used = self.num_blocks - self.available
        blocks = list(range(used, used + count))
        self.free = self.free[: len(self.free) - count]
        for block in blocks:
            self.references[block] = 1
        return blocks


@wrong("MyBlockPool", fails="a block becomes free when its last holder releases it, and not before")
class CountsInAByte(Pool):
    def share(self, blocks):
        for block in blocks:
            self.references[block] = (self.references[block] + 1) % 256


@wrong("MyBlockPool", fails="the lists passed in are not changed")
class SortsTheCallersList(Pool):
    def share(self, blocks):
        blocks.sort()
        super().share(blocks)


@wrong("MyBlockPool", fails="an empty list changes nothing")
class NeedsAFirstBlock(Pool):
    def share(self, blocks):
        self.references[blocks[0]] += 1
        super().share(blocks[1:])


@wrong("MyBlockPool", fails="two pools know nothing of each other")
class OneCountForAllPools(Pool):
    """Counts in a list of the class, which belongs to the newest pool."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        type(self).counts = self.references

    def share(self, blocks):
        for block in blocks:
            self.counts[block] += 1
