"""Wrong solutions of lesson 09: slots, a block pool, prefix keys, a pool with a prefix cache."""

import hashlib
import math
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


@wrong("slots_of", fails="the table may have more blocks than needed")
def assumes_the_last_block_of_the_table_is_the_last_one_used(table, start, end, block_size):
    slots = []
    for number, block in enumerate(table):
        filled = block_size if number < len(table) - 1 else end - number * block_size
        slots += [block * block_size + offset for offset in range(filled)]
    return slots[start:]


@wrong("slots_of", fails="the block size is the one given")
def bits_for_remainders(table, start, end, block_size):
    return [table[at // block_size] * block_size + (at & (block_size - 1)) for at in range(start, end)]


@wrong("slots_of", fails="the table is not changed")
def takes_blocks_out_of_the_table(table, start, end, block_size):
    slots = []
    for at in range(end):
        if at % block_size == 0:
            block = table.pop(0)
        slots.append(block * block_size + at % block_size)
    return slots[start:]


@wrong("slots_of", fails="the result is a list of integers")
def floats(table, start, end, block_size):
    return [table[at // block_size] * block_size + math.fmod(at, block_size) for at in range(start, end)]


@wrong("slots_of", fails="the result is a list of integers")
def yields_slots(table, start, end, block_size):
    return (table[at // block_size] * block_size + at % block_size for at in range(start, end))


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


# ---- prefix_keys


def _hash(parent, tokens):
    return hashlib.blake2b(parent + b"".join(token.to_bytes(4, "little") for token in tokens)).digest()


def _chain(tokens, block_size, parent, digest=_hash):
    keys = []
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = digest(parent, tokens[end - block_size : end])
        keys.append(parent)
    return keys


@wrong("prefix_keys", fails="a key depends on all tokens before its block")
def each_block_alone(tokens, block_size, salt=""):
    return _chain(tokens, block_size, b"", lambda _, block: _hash(salt.encode(), block))


@wrong("prefix_keys", fails="a key depends on all tokens before its block")
def only_one_block_back(tokens, block_size, salt=""):
    starts = range(0, len(tokens) - block_size + 1, block_size)
    return [_hash(salt.encode(), tokens[max(at - block_size, 0) : at + block_size]) for at in starts]


@wrong("prefix_keys", fails="a key does not depend on later tokens")
def length_hashed_too(tokens, block_size, salt=""):
    return _chain(tokens, block_size, _hash(salt.encode(), [len(tokens)]))


@wrong("prefix_keys", fails="each full block has a key, and no other")
def pads_the_last_block(tokens, block_size, salt=""):
    missing = -len(tokens) % block_size
    return _chain(list(tokens) + [0] * missing, block_size, salt.encode())


@wrong("prefix_keys", fails="the order of the tokens matters")
def sorted_first(tokens, block_size, salt=""):
    return _chain(tokens, block_size, salt.encode(), lambda parent, block: _hash(parent, sorted(block)))


@wrong("prefix_keys", fails="different tokens are told apart")
def digits_joined(tokens, block_size, salt=""):
    def digest(parent, block):
        return hashlib.sha256(parent + "".join(map(str, block)).encode()).digest()

    return _chain(tokens, block_size, salt.encode(), digest)


@wrong("prefix_keys", fails="another salt gives other keys")
def salt_forgotten(tokens, block_size, salt=""):
    return _chain(tokens, block_size, b"")


@wrong("prefix_keys", fails="each full block has a key, and no other")
def always_blocks_of_four(tokens, block_size, salt=""):
    return _chain(tokens, min(block_size, 4), _hash(salt.encode(), []))


@wrong("prefix_keys", fails="the order of the tokens matters")
def sum_of_the_blocks(tokens, block_size, salt=""):
    def digest(total, block):
        return total + int.from_bytes(_hash(b"", block))

    return _chain(tokens, block_size, int.from_bytes(_hash(salt.encode(), [])), digest)


@wrong("prefix_keys", fails="different tokens are told apart")
def one_byte_a_token(tokens, block_size, salt=""):
    return _chain(tokens, block_size, _hash(salt.encode(), []), lambda key, block: _hash(key, [t % 256 for t in block]))


@wrong("prefix_keys", fails="thousands of blocks have thousands of keys")
def two_bytes_of_the_hash(tokens, block_size, salt=""):
    return _chain(tokens, block_size, salt.encode(), lambda key, block: _hash(key, block)[:2])


@wrong("prefix_keys", fails="another salt gives other keys")
def first_letter_of_the_salt(tokens, block_size, salt=""):
    return _chain(tokens, block_size, salt[:1].encode())


@wrong("prefix_keys", fails="the tokens are not changed")
def deletes_what_it_has_hashed(tokens, block_size, salt=""):
    key, keys = salt.encode(), []
    while len(tokens) >= block_size:
        key = _hash(key, tokens[:block_size])
        del tokens[:block_size]
        keys.append(key)
    return keys


@wrong("prefix_keys", fails="the result is a list of dictionary keys")
def lists_for_keys(tokens, block_size, salt=""):
    return [[salt, *tokens[:end]] for end in range(block_size, len(tokens) + 1, block_size)]


@wrong("prefix_keys", fails="the result is a list of dictionary keys")
def yields_keys(tokens, block_size, salt=""):
    yield from _chain(tokens, block_size, salt.encode())


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


@wrong("MyPrefixPool", fails="blocks without a key are reused first")
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
        self.lru.pop(block, None)
        super().cache_or_free(block)


@wrong("MyPrefixPool", fails="an evicted block can no longer be found")
class OldKeysStay(PrefixPool):
    """The block forgets its key, but looking up the key still finds the block."""

    def evict(self):
        block, _ = self.lru.popitem(last=False)
        self.key_of.pop(block)
        return block


@wrong("MyPrefixPool", fails="an evicted block can no longer be found")
class BlockKeepsItsKey(PrefixPool):
    def evict(self):
        block, _ = self.lru.popitem(last=False)
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
            if block in self.lru:
                del self.lru[block]
            else:
                self.references[block] += 1


@wrong("MyPrefixPool", fails="the other cached blocks are still found")
class ForgetsAllKeys(PrefixPool):
    def evict(self):
        block, _ = self.lru.popitem(last=False)
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
