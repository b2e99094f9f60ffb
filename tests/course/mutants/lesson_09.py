"""Wrong solutions of lesson 09: slots, a block pool, prefix keys, a pool with a prefix cache."""

import hashlib
from collections import OrderedDict

from minillm.kv_cache import OutOfBlocks
from tests.course.mutants import wrong

# ---- slots_of


@wrong("slots_of", fails="blocks may be anywhere in memory")
def assumes_contiguous_blocks(table, start, end, block_size):
    return [table[0] * block_size + position for position in range(start, end)]


@wrong("slots_of", fails="the offset starts again in each block")
def position_for_offset(table, start, end, block_size):
    return [table[position // block_size] * block_size + position for position in range(start, end)]


@wrong("slots_of", fails="positions count from the request's first token")
def start_forgotten(table, start, end, block_size):
    return [table[at // block_size] * block_size + at % block_size for at in range(end - start)]


@wrong("slots_of", fails="positions count from the request's first token")
def offset_counted_from_start(table, start, end, block_size):
    return [table[at // block_size] * block_size + (at - start) % block_size for at in range(start, end)]


@wrong("slots_of", fails="the block size is the one given")
def blocks_of_four(table, start, end, block_size):
    return [table[position // block_size] * 4 + position % block_size for position in range(start, end)]


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


@wrong("MyBlockPool", fails="what is released can be given out again")
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


@wrong("MyBlockPool", fails="a block is free when its last holder releases it, and not before")
class FirstHolderFrees(Pool):
    def release(self, blocks):
        for block in blocks:
            if self.references[block]:
                self.references[block] = 0
                self.free.append(block)


@wrong("MyBlockPool", fails="a block is free when its last holder releases it, and not before")
class FlagInsteadOfCount(Pool):
    """A flag instead of a count: a third holder is not noticed."""

    def share(self, blocks):
        for block in blocks:
            self.references[block] = 2


@wrong("MyBlockPool", fails="more than there are is refused, and takes nothing")
class AllocatesBeforeRaising(Pool):
    def allocate(self, count):
        blocks = []
        for _ in range(count):
            if not self.free:
                raise OutOfBlocks("none left")
            blocks.append(self.free.pop())
            self.references[blocks[-1]] = 1
        return blocks


@wrong("MyBlockPool", fails="none are given where none are asked for")
class SlicesFromTheEnd(Pool):
    def allocate(self, count):
        if count > self.available:
            raise OutOfBlocks(f"{count} asked for")
        blocks = self.free[-count:]
        del self.free[-count:]
        for block in blocks:
            self.references[block] = 1
        return blocks


# ---- prefix_keys


def _hash(parent, tokens):
    return hashlib.blake2b(parent + b"".join(token.to_bytes(4, "little") for token in tokens)).digest()


def _chain(tokens, block_size, parent, digest=_hash):
    keys = []
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = digest(parent, tokens[end - block_size : end])
        keys.append(parent)
    return keys


@wrong("prefix_keys", fails="a key speaks for all tokens before it")
def each_block_alone(tokens, block_size, salt=""):
    return _chain(tokens, block_size, b"", lambda _, block: _hash(salt.encode(), block))


@wrong("prefix_keys", fails="what comes later does not matter")
def length_hashed_too(tokens, block_size, salt=""):
    return _chain(tokens, block_size, _hash(salt.encode(), [len(tokens)]))


@wrong("prefix_keys", fails="only full blocks have a key")
def pads_the_last_block(tokens, block_size, salt=""):
    missing = -len(tokens) % block_size
    return _chain(list(tokens) + [0] * missing, block_size, salt.encode())


@wrong("prefix_keys", fails="the order of the tokens counts")
def sorted_first(tokens, block_size, salt=""):
    return _chain(tokens, block_size, salt.encode(), lambda parent, block: _hash(parent, sorted(block)))


@wrong("prefix_keys", fails="each token counts for itself")
def digits_joined(tokens, block_size, salt=""):
    def digest(parent, block):
        return hashlib.sha256(parent + "".join(map(str, block)).encode()).digest()

    return _chain(tokens, block_size, salt.encode(), digest)


@wrong("prefix_keys", fails="another salt gives other keys")
def salt_forgotten(tokens, block_size, salt=""):
    return _chain(tokens, block_size, b"")


# ---- MyPrefixPool


class PrefixPool(Pool):
    """A correct pool, the base of the wrong ones."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.lru = OrderedDict()
        self.block_of = {}
        self.key_of = {}

    @property
    def available(self):
        return len(self.free) + len(self.lru)

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
            self.lru.pop(block, None)
            self.references[block] += 1

    def release(self, blocks):
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self.cache_or_free(block)

    def cache_or_free(self, block):
        if block in self.key_of:
            self.lru[block] = None
        else:
            self.free.append(block)

    def evict(self):
        block, _ = self.lru.popitem(last=False)
        if block in self.key_of:
            del self.block_of[self.key_of.pop(block)]
        return block


@wrong("MyPrefixPool", fails="blocks without a key are evicted first")
class KeepsEverything(PrefixPool):
    def cache_or_free(self, block):
        self.lru[block] = None


@wrong("MyPrefixPool", fails="the least recently used block is evicted first")
class EvictsTheNewest(PrefixPool):
    """Releases blocks in the other order, so the end of a sequence is still evicted before its beginning."""

    def release(self, blocks):
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self.cache_or_free(block)

    def evict(self):
        block, _ = self.lru.popitem(last=True)
        del self.block_of[self.key_of.pop(block)]
        return block


@wrong("MyPrefixPool", fails="the end of a sequence goes before its beginning")
class EvictsTheBeginningFirst(PrefixPool):
    def release(self, blocks):
        super().release(blocks[::-1])


@wrong("MyPrefixPool", fails="a block that is shared again is safe")
class KeepsSharedBlocksEvictable(PrefixPool):
    """A shared block leaves the LRU list only when it is released again."""

    def share(self, blocks):
        for block in blocks:
            self.references[block] += 1

    def cache_or_free(self, block):
        self.lru.pop(block, None)
        super().cache_or_free(block)


@wrong("MyPrefixPool", fails="an evicted block is forgotten")
class OldKeysStay(PrefixPool):
    """The block forgets its key, but looking up the key still finds the block."""

    def evict(self):
        block, _ = self.lru.popitem(last=False)
        self.key_of.pop(block)
        return block


@wrong("MyPrefixPool", fails="an evicted block is forgotten")
class BlockKeepsItsKey(PrefixPool):
    def evict(self):
        block, _ = self.lru.popitem(last=False)
        del self.block_of[self.key_of[block]]
        return block
