"""Wrong solutions of lesson 09's prefix keys."""

import hashlib
import struct
import zlib

from tests.course.mutants import wrong


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


@wrong("prefix_keys", fails="a key depends on all tokens before its block")
def first_block_and_the_one_before(tokens, block_size, salt=""):
    """The parent is set only once: the third block does not change when the second does."""
    keys, first = [], None
    for end in range(block_size, len(tokens) + 1, block_size):
        keys.append(_hash(first or salt.encode(), tokens[end - block_size : end]))
        first = first or keys[0]
    return keys


@wrong("prefix_keys", fails="a key depends on all tokens before its block")
def a_salt_instead_of_the_parent(tokens, block_size, salt=""):
    """With a salt, it takes the parent's place in every block, and nothing is chained."""
    return _chain(tokens, block_size, b"", lambda parent, block: _hash(salt.encode() or parent, block))


@wrong("prefix_keys", fails="a key depends on all tokens before its block")
def the_last_eight_blocks(tokens, block_size, salt=""):
    ends = range(block_size, len(tokens) + 1, block_size)
    return [
        _hash(salt.encode() + (end // block_size).to_bytes(2), tokens[max(end - 8 * block_size, 0) : end])
        for end in ends
    ]


@wrong("prefix_keys", fails="a key depends on all tokens of its block")
def three_tokens_of_each_block(tokens, block_size, salt=""):
    return _chain(tokens, block_size, salt.encode(), lambda parent, block: _hash(parent, block[:3]))


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


@wrong("prefix_keys", fails="another salt gives other keys")
def salt_runs_into_the_first_token(tokens, block_size, salt=""):
    ends = range(block_size, len(tokens) + 1, block_size)
    return [hash(salt + ",".join(map(str, tokens[:end]))) for end in ends]


@wrong("prefix_keys", fails="another salt gives other keys")
def small_letters(tokens, block_size, salt=""):
    return _chain(tokens, block_size, _hash(salt.lower().encode(), []))


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


@wrong("prefix_keys", fails="thousands of blocks have thousands of keys")
def thirty_bits_of_the_hash(tokens, block_size, salt=""):
    return _chain(tokens, block_size, hash(salt), lambda key, block: hash((key, *block)) % 2**30)


@wrong("prefix_keys", fails="thousands of blocks have thousands of keys")
def a_checksum(tokens, block_size, salt=""):
    """CRC-32, which is made to detect errors: it has 32 bits."""
    return _chain(
        tokens, block_size, zlib.crc32(salt.encode()), lambda key, block: zlib.crc32(repr(block).encode(), key)
    )


@wrong("prefix_keys", fails="thousands of blocks have thousands of keys")
def eight_digits_of_the_hash(tokens, block_size, salt=""):
    def digest(key, block):
        return hashlib.sha256(f"{key} {block}".encode()).hexdigest()[:8]

    return _chain(tokens, block_size, salt, digest)


@wrong("prefix_keys", fails="a key depends on all tokens before its block")
def the_last_hundred_blocks(tokens, block_size, salt=""):
    ends = range(block_size, len(tokens) + 1, block_size)
    return [hash((salt, end, *tokens[max(end - 100 * block_size, 0) : end])) for end in ends]


@wrong("prefix_keys", fails="the result is a list of dictionary keys")
def a_tuple_of_keys(tokens, block_size, salt=""):
    return tuple(_chain(tokens, block_size, _hash(salt.encode(), [])))


_KEYS: list[bytes] = []


@wrong("prefix_keys", fails="each call returns a new list")
def the_same_list_each_time(tokens, block_size, salt=""):
    _KEYS[:] = _chain(tokens, block_size, _hash(salt.encode(), []))
    return _KEYS


@wrong("prefix_keys", fails="thousands of blocks have thousands of keys")
def hands_on_24_bits(tokens, block_size, salt=""):
    """Long keys, and a chain that loses most of the prefix."""
    keys, parent = [], hash(salt)
    for end in range(block_size, len(tokens) + 1, block_size):
        keys.append(hash((parent, *tokens[end - block_size : end])))
        parent = keys[-1] % 2**24
    return keys


@wrong("prefix_keys", fails="another salt gives other keys")
def the_beginning_of_the_salt(tokens, block_size, salt=""):
    return _chain(tokens, block_size, _hash(salt[:16].encode(), []))


@wrong("prefix_keys", fails="another salt gives other keys")
def the_end_of_the_salt(tokens, block_size, salt=""):
    return _chain(tokens, block_size, _hash(salt[-16:].encode(), []))


@wrong("prefix_keys", fails="a key depends on all tokens of its block")
def sixteen_tokens_of_each_block(tokens, block_size, salt=""):
    return _chain(tokens, block_size, salt.encode(), lambda parent, block: _hash(parent, block[:16]))


@wrong("prefix_keys", fails="the order of the tokens matters")
def first_token_and_the_sum(tokens, block_size, salt=""):
    return _chain(tokens, block_size, salt.encode(), lambda parent, block: _hash(parent, [block[0], sum(block)]))


@wrong("prefix_keys", fails="the order of the tokens matters")
def first_token_and_the_rest_sorted(tokens, block_size, salt=""):
    return _chain(tokens, block_size, salt.encode(), lambda parent, block: _hash(parent, block[:1] + sorted(block[1:])))


@wrong("prefix_keys", fails="the order of the tokens matters")
def zero_is_no_token(tokens, block_size, salt=""):
    """A token is tested for truth, so 0 is left out."""
    return _chain(
        tokens, block_size, salt.encode(), lambda parent, block: _hash(parent, [token for token in block if token])
    )


@wrong("prefix_keys", fails="different tokens are told apart")
def repeated_tokens_once(tokens, block_size, salt=""):
    return _chain(tokens, block_size, salt.encode(), lambda parent, block: _hash(parent, list(dict.fromkeys(block))))


@wrong("prefix_keys", fails="different tokens are told apart")
def half_precision(tokens, block_size, salt=""):
    """From 2,048 on, not every whole number is a float16."""
    return _chain(
        tokens,
        block_size,
        salt.encode(),
        lambda parent, block: _hash(parent, [int.from_bytes(struct.pack("<e", min(token, 65_000))) for token in block]),
    )


@wrong("prefix_keys", fails="another salt gives other keys")
def ascii_letters_of_the_salt(tokens, block_size, salt=""):
    return _chain(tokens, block_size, salt.encode("ascii", "ignore"))
