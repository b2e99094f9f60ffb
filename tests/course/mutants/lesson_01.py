"""Wrong solutions of lesson 01's exercises on merges."""

import re
from collections import Counter
from itertools import pairwise

from minillm.course.lesson_01.vocabularies import counting_learn, engines_learn, scanning_merge
from minillm.tokenizer import bpe
from minillm.tokenizer.training import join_pair
from tests.course.mutants import wrong


def join_one_at_a_time(symbols, rank, place=lambda i, pair: i):
    """The rule of the lesson. rank: pair -> its rank or None; place: what to compare pairs of equal rank by."""
    symbols = list(symbols)
    while found := [
        (rank(pair), place(i, pair), i) for i, pair in enumerate(pairwise(symbols)) if rank(pair) is not None
    ]:
        i = min(found)[2]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return symbols


FIRST = "the pair learned first is joined first"


@wrong("bpe_merge", fails=FIRST)
def leftmost_pair(symbols, ranks):
    return join_one_at_a_time(symbols, lambda pair: 0 if pair in ranks else None)


@wrong("bpe_merge", fails=FIRST)
def longest_from_the_left(symbols, ranks):
    out = []
    for symbol in symbols:
        if out and (out[-1], symbol) in ranks:
            out[-1] += symbol
        else:
            out.append(symbol)
    return out


@wrong("bpe_merge", fails="what a join makes can be joined again")
def only_the_first_pairs(symbols, ranks):
    known = set(pairwise(symbols))
    for pair in sorted(known & ranks.keys(), key=ranks.get):
        symbols = join_pair(symbols, *pair)
    return list(symbols)


@wrong("bpe_merge", fails="what a join makes can be joined again")
def one_pass_over_the_ranks(symbols, ranks):
    for pair in sorted(ranks, key=ranks.get):
        symbols = join_pair(symbols, *pair)
    return list(symbols)


@wrong("bpe_merge", fails="what a join makes can be joined again")
def all_places_at_once(symbols, ranks):
    """What GPT-2's code does: the same for learned merges, not for every list of ranks."""
    symbols = list(symbols)
    while known := [pair for pair in pairwise(symbols) if pair in ranks]:
        symbols = join_pair(symbols, *min(known, key=ranks.get))
    return symbols


@wrong("bpe_merge", fails="what a join makes can be joined again")
def replaced_in_one_string(symbols, ranks):
    """`replace` joins all places but those right after another one."""
    symbols = list(symbols)
    while known := [pair for pair in pairwise(symbols) if pair in ranks]:
        left, right = min(known, key=ranks.get)
        text = "\0" + "\0".join(symbols) + "\0"
        symbols = text.replace(f"\0{left}\0{right}\0", f"\0{left}{right}\0").strip("\0").split("\0")
    return symbols


@wrong("bpe_merge", fails="what a join makes can be joined again")
def no_token_of_more_than_16_characters(symbols, ranks):
    return join_one_at_a_time(symbols, lambda pair: ranks.get(pair) if len("".join(pair)) <= 16 else None)


@wrong("bpe_merge", fails="a symbol may have several characters")
def begins_with_characters(symbols, ranks):
    return join_one_at_a_time("".join(symbols), ranks.get)


@wrong("bpe_merge", fails="the list of merges may be long")
def a_large_number_for_no_rank(symbols, ranks):
    return join_one_at_a_time(symbols, lambda pair: rank if (rank := ranks.get(pair, 10_000)) < 10_000 else None)


@wrong("bpe_merge", fails="the list of merges may be long")
def stops_at_a_large_number(symbols, ranks):
    symbols = list(symbols)
    while len(symbols) > 1:
        found = [ranks.get(pair, 10_000) for pair in pairwise(symbols)]
        if min(found) == 10_000:
            break
        place = found.index(min(found))
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    return symbols


@wrong("bpe_merge", fails="a pair is joined wherever it occurs")
def only_the_first_64_symbols(symbols, ranks):
    return join_one_at_a_time(symbols[:64], ranks.get) + list(symbols[64:])


@wrong("bpe_merge", fails="a pair is joined wherever it occurs")
def never_goes_back_to_the_left(symbols, ranks):
    """After a join, it looks only at the pairs from the new one on."""
    symbols, start = list(symbols), 0
    while found := [(ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if i >= start and pair in ranks]:
        i = min(found)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        start = max(0, i - 1)
    return symbols


@wrong("bpe_merge", fails="the joins are your own")
def calls_the_engine(symbols, ranks):
    return bpe.merge(symbols, ranks)


@wrong("bpe_merge", fails="the joins are your own")
def calls_the_slow_merge(symbols, ranks):
    return scanning_merge(symbols, ranks)


MERGED = {}


@wrong("bpe_merge", fails="each call makes a list of its own")
def the_list_of_an_earlier_call(symbols, ranks):
    call = (tuple(symbols), tuple(ranks.items()))
    if call not in MERGED:
        MERGED[call] = join_one_at_a_time(symbols, ranks.get)
    return MERGED[call]


MERGED_WITH = []  # (symbols, ranks, result)


@wrong("bpe_merge", fails="each call makes a list of its own")
def the_list_of_an_earlier_call_with_these_ranks(symbols, ranks):
    for known, its_ranks, joined in MERGED_WITH:
        if known == symbols and its_ranks is ranks:
            return joined
    joined = join_one_at_a_time(symbols, ranks.get)
    MERGED_WITH.append((list(symbols), ranks, joined))
    return joined


@wrong("bpe_merge", fails="a pair is joined wherever it occurs")
def as_many_joins_as_merges(symbols, ranks):
    symbols = list(symbols)
    for _ in range(max(3, len(ranks))):
        found = [(ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]
        if not found:
            break
        place = min(found)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    return symbols


@wrong("bpe_merge", fails="a pair is joined wherever it occurs")
def first_place_of_each_pair(symbols, ranks):
    symbols, left = list(symbols), dict(ranks)
    while True:
        found = [(left[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in left]
        if not found:
            return symbols
        place = min(found)[1]
        del left[symbols[place], symbols[place + 1]]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


@wrong("bpe_merge", fails="where places overlap, the left one is joined")
def rightmost_in_a_run_of_equals(symbols, ranks):
    return join_one_at_a_time(symbols, ranks.get, lambda i, pair: -i if pair[0] == pair[1] else i)


@wrong("bpe_merge", fails="what a join makes can be joined again")
def half_as_many_joins_as_symbols(symbols, ranks):
    symbols = list(symbols)
    for _ in range(len(symbols) // 2 + 1):
        found = [(ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]
        if found:
            place = min(found)[1]
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    return symbols


def join_best_pair(symbols, ranks, is_its_place):
    symbols = list(symbols)
    while known := [pair for pair in pairwise(symbols) if pair in ranks]:
        best = min(known, key=ranks.get)
        place = next(i for i, pair in enumerate(pairwise(symbols)) if is_its_place(pair, best))
        symbols[place : place + 2] = ["".join(best)]
    return symbols


@wrong("bpe_merge", fails="only a pair that has a rank is joined")
def at_the_first_place_of_the_left_symbol(symbols, ranks):
    """Loses the symbol that follows there."""
    return join_best_pair(symbols, ranks, lambda pair, best: pair[0] == best[0])


@wrong("bpe_merge", fails="only a pair that has a rank is joined")
def at_the_first_place_of_the_joined_text(symbols, ranks):
    return join_best_pair(symbols, ranks, lambda pair, best: "".join(pair) == "".join(best))


@wrong("bpe_merge", fails="only a pair that has a rank is joined")
def by_the_joined_text(symbols, ranks):
    texts = {left + right: rank for (left, right), rank in ranks.items()}
    return join_one_at_a_time(symbols, lambda pair: texts.get("".join(pair)))


@wrong("bpe_merge", fails="the rank is the number, whatever the order of the dict")
def in_the_order_of_the_dict(symbols, ranks):
    order = list(ranks)
    return join_one_at_a_time(symbols, lambda pair: order.index(pair) if pair in ranks else None)


@wrong("bpe_merge", fails="a word may have nothing to join")
def never_an_empty_list(symbols, ranks):
    return join_one_at_a_time(symbols, ranks.get) or [""]


@wrong("bpe_merge", fails="the arguments do not change")
def modifies_the_callers_list(symbols, ranks):
    while found := [(ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]:
        place = min(found)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    return symbols


def learn(word_counts, steps, weight=lambda count: count, order=lambda pair: pair, join=join_pair, places=pairwise):
    words = [(list(word), count) for word, count in word_counts.items()]
    merges = []
    while len(merges) < steps:
        counts = Counter()
        for symbols, count in words:
            for pair in places(symbols):
                counts[pair] += weight(count)
        if not counts:
            break
        merges.append(min(counts, key=lambda pair: (-counts[pair], order(pair))))
        words = [(join(symbols, *merges[-1]), count) for symbols, count in words]
    return merges


@wrong("learn_merges", fails="a word counts as often as it occurs")
def each_word_once(word_counts, steps):
    return learn(word_counts, steps, weight=lambda count: 1)


LEARNED = {}


@wrong("learn_merges", fails="a word counts as often as it occurs")
def learned_once_for_the_same_words(word_counts, steps):
    call = (tuple(word_counts), steps)
    if call not in LEARNED:
        LEARNED[call] = learn(word_counts, steps)
    return list(LEARNED[call])


@wrong("learn_merges", fails="each call makes a list of its own")
def the_merges_of_an_earlier_call(word_counts, steps):
    call = (tuple(word_counts.items()), steps)
    if call not in LEARNED:
        LEARNED[call] = learn(word_counts, steps)
    return LEARNED[call]


@wrong("learn_merges", fails="a word counts as often as it occurs")
def roots_of_counts(word_counts, steps):
    """Less weight for frequent words, as for frequent languages in a text."""
    return learn(word_counts, steps, weight=lambda count: count**0.5)


@wrong("learn_merges", fails="no pair reaches across words")
def one_long_text(word_counts, steps):
    return learn({"".join(word * count for word, count in word_counts.items()): 1}, steps)


@wrong("learn_merges", fails="of equal counts, the pair that sorts first wins")
def first_met(word_counts, steps):
    return learn(word_counts, steps, order=lambda pair: 0)


@wrong("learn_merges", fails="of equal counts, the pair that sorts first wins")
def by_the_left_symbol_only(word_counts, steps):
    return learn(word_counts, steps, order=lambda pair: pair[0])


@wrong("learn_merges", fails="of equal counts, the pair that sorts first wins")
def by_the_right_symbol_first(word_counts, steps):
    return learn(word_counts, steps, order=lambda pair: pair[::-1])


@wrong("learn_merges", fails="of equal counts, the pair that sorts first wins")
def last_in_order(word_counts, steps):
    return learn(word_counts, steps, order=lambda pair: [-ord(character) for character in "".join(pair)])


@wrong("learn_merges", fails="of equal counts, the pair that sorts first wins")
def shortest_first(word_counts, steps):
    return learn(word_counts, steps, order=lambda pair: (len("".join(pair)), pair))


@wrong("learn_merges", fails="of equal counts, the pair that sorts first wins")
def case_ignored(word_counts, steps):
    return learn(word_counts, steps, order=lambda pair: [symbol.lower() for symbol in pair])


@wrong("learn_merges", fails="where places overlap, the left one is joined")
def joins_from_the_right(word_counts, steps):
    def join(symbols, left, right):
        symbols = list(symbols)
        for i in reversed(range(len(symbols) - 1)):
            if symbols[i : i + 2] == [left, right]:
                symbols[i : i + 2] = [left + right]
        return symbols

    return learn(word_counts, steps, join=join)


@wrong("learn_merges", fails="there may be many words and long tokens")
def at_most_a_hundred_merges(word_counts, steps):
    return learn(word_counts, min(steps, 100))


@wrong("learn_merges", fails="there may be many words and long tokens")
def tokens_of_eight_characters(word_counts, steps):
    def places(symbols):
        return [pair for pair in pairwise(symbols) if len("".join(pair)) <= 8]

    return learn(word_counts, steps, places=places)


@wrong("learn_merges", fails="a pair is joined at all its places in a word")
def every_second_of_neighboring_places(word_counts, steps):
    """A replacement of text that includes the separators on both sides: the next place lacks its left one."""

    def join(symbols, left, right):
        text = "\0".join(["", *symbols, ""])
        return text.replace(f"\0{left}\0{right}\0", f"\0{left + right}\0").strip("\0").split("\0")

    return learn(word_counts, steps, join=join)


@wrong("learn_merges", fails="the counting is your own")
def calls_the_engine_to_learn(word_counts, steps):
    return engines_learn(word_counts, steps)


@wrong("learn_merges", fails="counts follow each join")
def counted_once(word_counts, steps):
    counts = Counter()
    for word, count in word_counts.items():
        for pair in pairwise(word):
            counts[pair] += count
    return sorted(counts, key=lambda pair: (-counts[pair], pair))[:steps]


@wrong("learn_merges", fails="a pair is joined at all its places in a word")
def first_place_in_each_word(word_counts, steps):
    def join_first(symbols, left, right):
        for i, pair in enumerate(pairwise(symbols)):
            if pair == (left, right):
                return [*symbols[:i], left + right, *symbols[i + 2 :]]
        return symbols

    return learn(word_counts, steps, join=join_first)


@wrong("learn_merges", fails="of equal counts, the pair that sorts first wins")
def sorted_by_the_joined_text(word_counts, steps):
    return learn(word_counts, steps, order="".join)


@wrong("learn_merges", fails="a pair counts at every place in a word")
def once_for_each_word(word_counts, steps):
    return learn(word_counts, steps, places=lambda symbols: set(pairwise(symbols)))


@wrong("learn_merges", fails="a pair counts at every place in a word")
def overlapping_places_once(word_counts, steps):
    def places(symbols):
        last = None
        for pair in pairwise(symbols):
            last = None if pair == last and pair[0] == pair[1] else pair
            if last:
                yield pair

    return learn(word_counts, steps, places=places)


@wrong("learn_merges", fails="only whole symbols are joined")
def replaces_text(word_counts, steps):
    def join(symbols, left, right):
        return " ".join(symbols).replace(f"{left} {right}", left + right).split(" ")

    return learn(word_counts, steps, join=join)


def join_by_pattern(symbols, left, right):
    """Joins in one string, as the code of Sennrich et al. does, without its re.escape."""
    return re.sub(rf"(?<!\S){left} {right}(?!\S)", left + right, " ".join(symbols)).split(" ")


@wrong("learn_merges", fails="only whole symbols are joined")
def a_period_matches_any_character(word_counts, steps):
    return learn(word_counts, steps, join=join_by_pattern)


@wrong("learn_merges", fails="only whole symbols are joined")
def loses_newlines(word_counts, steps):
    """`split()` splits at newlines too, and drops them."""
    return learn(word_counts, steps, join=lambda *given: " ".join(join_pair(*given)).split())


@wrong("learn_merges", fails="the caller's counts do not change")
def takes_words_out_of_the_dict(word_counts, steps):
    merges = learn(word_counts, steps)
    for word in [word for word in word_counts if len(word) < 3]:
        del word_counts[word]
    return merges


@wrong("learn_merges", fails="the counting is your own")
def calls_the_slow_counting(word_counts, steps):
    return counting_learn(word_counts, steps)
