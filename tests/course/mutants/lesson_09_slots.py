"""Wrong solutions of lesson 09's slots."""

import math

import torch

from tests.course.mutants import wrong


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


@wrong("slots_of", fails="the table is not changed")
def drops_spare_blocks(table, start, end, block_size):
    while len(table) > math.ceil(end / block_size):
        table.pop()
    return [table[at // block_size] * block_size + at % block_size for at in range(start, end)]


@wrong("slots_of", fails="the result is a list of integers")
def a_tuple(table, start, end, block_size):
    return tuple(table[at // block_size] * block_size + at % block_size for at in range(start, end))


@wrong("slots_of", fails="the result is a list of integers")
def floats(table, start, end, block_size):
    return [table[at // block_size] * block_size + math.fmod(at, block_size) for at in range(start, end)]


@wrong("slots_of", fails="the result is a list of integers")
def yields_slots(table, start, end, block_size):
    return (table[at // block_size] * block_size + at % block_size for at in range(start, end))


@wrong("slots_of", fails="the result is a list of integers")
def a_list_of_tensors(table, start, end, block_size):
    at = torch.arange(start, end)
    return list(torch.tensor(table)[at // block_size] * block_size + at % block_size)


_KNOWN: dict[tuple, list[int]] = {}


@wrong("slots_of", fails="the block size is the one given")
def remembers_without_the_block_size(table, start, end, block_size):
    key = (*table, start, end)
    if key not in _KNOWN:
        _KNOWN[key] = [table[at // block_size] * block_size + at % block_size for at in range(start, end)]
    return list(_KNOWN[key])


@wrong("slots_of", fails="a long request finds its tokens in a large memory")
def numbers_of_16_bits(table, start, end, block_size):
    at = torch.arange(start, end)
    return (torch.tensor(table)[at // block_size] * block_size + at % block_size).to(torch.int16).tolist()


@wrong("slots_of", fails="a long request finds its tokens in a large memory")
def single_precision(table, start, end, block_size):
    at = torch.arange(start, end)
    return (torch.tensor(table, dtype=torch.float32)[at // block_size] * block_size + at % block_size).int().tolist()


@wrong("slots_of", fails="a long request finds its tokens in a large memory")
def wraps_in_a_small_memory(table, start, end, block_size):
    return [(table[at // block_size] * block_size + at % block_size) % 1024 for at in range(start, end)]


_SLOTS: list[int] = []


@wrong("slots_of", fails="each call returns a new list")
def the_same_list_each_time(table, start, end, block_size):
    _SLOTS[:] = [table[at // block_size] * block_size + at % block_size for at in range(start, end)]
    return _SLOTS


_BY_ENDS: dict[tuple, list[int]] = {}


@wrong("slots_of", fails="blocks may be anywhere in memory")
def remembers_by_the_ends_of_the_table(table, start, end, block_size):
    key = (table[0], table[-1], len(table), start, end, block_size)
    if key not in _BY_ENDS:
        _BY_ENDS[key] = [table[at // block_size] * block_size + at % block_size for at in range(start, end)]
    return list(_BY_ENDS[key])
