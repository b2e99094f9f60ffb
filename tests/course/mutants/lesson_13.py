"""Wrong solutions of lesson 13: drafts that are accepted, prompt lookup, how many drafts pay."""

from itertools import accumulate

from tests.course.mutants import wrong

# ---- accepted


def _right(drafts, sampled):
    right = 0
    while right < len(drafts) and drafts[right] == sampled[right]:
        right += 1
    return right


@wrong("accepted", fails="a first draft that is wrong leaves the target's own token")
def nothing_if_the_first_is_wrong(drafts, sampled):
    right = _right(drafts, sampled)
    return sampled[: right + 1] if right or not drafts else []


@wrong("accepted", fails="a first draft that is wrong leaves the target's own token")
def keeps_a_first_draft_that_is_wrong(drafts, sampled):
    right = _right(drafts, sampled)
    first = drafts[:1] if drafts and drafts[0] not in sampled and len(drafts) < 4 else sampled[:1]
    return [*first, *sampled[1 : right + 1]]


@wrong("accepted", fails="if no draft is wrong, the target's token after the last one is gained too")
def no_token_beyond_the_drafts(drafts, sampled):
    gained = []
    for draft, own in zip(drafts, sampled, strict=False):
        gained.append(own)
        if draft != own:
            break
    return gained


@wrong("accepted", fails="if no draft is wrong, the target's token after the last one is gained too")
def nothing_without_drafts(drafts, sampled):
    return sampled[: _right(drafts, sampled) + 1] if drafts else []


@wrong("accepted", fails="nothing counts after the first wrong draft")
def counts_every_place_that_agrees(drafts, sampled):
    return sampled[: sum(a == b for a, b in zip(drafts, sampled, strict=False)) + 1]


@wrong("accepted", fails="nothing counts after the first wrong draft")
def up_to_the_last_place_that_agrees(drafts, sampled):
    agree = [at for at, (a, b) in enumerate(zip(drafts, sampled, strict=False)) if a == b]
    return sampled[: (agree[-1] + 2 if agree else 1)]


@wrong("accepted", fails="tokens may repeat")
def looks_for_a_draft_nearby(drafts, sampled):
    right = 0
    while right < len(drafts) and drafts[right] in sampled[right : right + 2]:
        right += 1
    return sampled[: right + 1]


@wrong("accepted", fails="tokens may repeat")
def finds_the_place_by_value(drafts, sampled):
    wrong = [each for each, own in zip(drafts, sampled, strict=False) if each != own]
    return sampled[: drafts.index(wrong[0]) + 1] if wrong else list(sampled)


@wrong("accepted", fails="tokens may repeat")
def takes_the_token_after_the_draft_by_its_value(drafts, sampled):
    gained = [sampled[0]]
    for draft in drafts:
        if draft != gained[-1]:
            break
        gained.append(sampled[drafts.index(draft) + 1])
    return gained


@wrong("accepted", fails="any number of drafts, and any token id")
def up_to_seven_drafts(drafts, sampled):
    return sampled[: min(_right(drafts, sampled), 7) + 1]


@wrong("accepted", fails="any number of drafts, and any token id")
def compares_objects(drafts, sampled):
    right = 0
    while right < len(drafts) and drafts[right] is sampled[right]:
        right += 1
    return sampled[: right + 1]


@wrong("accepted", fails="any number of drafts, and any token id")
def compares_bytes(drafts, sampled):
    return sampled[: _right([each % 256 for each in drafts], [each % 256 for each in sampled]) + 1]


@wrong("accepted", fails="any number of drafts, and any token id")
def compares_16_bits(drafts, sampled):
    return sampled[: _right([each % 2**16 for each in drafts], [each % 2**16 for each in sampled]) + 1]


# ---- lookup

SIZES = (8, 4, 2)


def _places(tokens, size, last=0):
    """Earlier places of the last `size` tokens, the newest first."""
    begins = range(len(tokens) - size - 1 + last, -1, -1)
    return [begin for begin in begins if tokens[begin : begin + size] == tokens[len(tokens) - size :]]


def _drafts(tokens, most, sizes, choose=lambda places: places[0]):
    for size in sizes:
        if places := _places(tokens, size):
            begin = choose(places) + size
            return tokens[begin : begin + most]
    return []


@wrong("lookup", fails="no more than `most` drafts")
def all_that_follows(tokens, most, sizes=SIZES):
    return _drafts(tokens, len(tokens), sizes)


@wrong("lookup", fails="no more than `most` drafts")
def the_last_of_what_follows(tokens, most, sizes=SIZES):
    return _drafts(tokens, len(tokens), sizes)[-most:]


@wrong("lookup", fails="if fewer tokens follow, they are the drafts")
def nothing_if_fewer_follow(tokens, most, sizes=SIZES):
    found = _drafts(tokens, most, sizes)
    return found if len(found) == most else []


@wrong("lookup", fails="if fewer tokens follow, they are the drafts")
def goes_on_in_a_circle(tokens, most, sizes=SIZES):
    found = _drafts(tokens, most, sizes)
    period = len(found)
    while found and len(found) < most:
        found.append(found[len(found) - period])
    return found


@wrong("lookup", fails="the end of the text is not an earlier place")
def repeats_the_last_tokens(tokens, most, sizes=SIZES):
    return _drafts(tokens, most, sizes) or (tokens[-most:] if sizes == SIZES else [])


@wrong("lookup", fails="an earlier place may overlap the end")
def no_overlap(tokens, most, sizes=SIZES):
    for size in sizes:
        if places := [begin for begin in _places(tokens, size) if begin + size <= len(tokens) - size]:
            return tokens[places[0] + size : places[0] + size + most]
    return []


@wrong("lookup", fails="if fewer tokens follow, they are the drafts")
def an_older_place_that_more_tokens_follow(tokens, most, sizes=SIZES):
    for size in sizes:
        if places := _places(tokens, size):
            enough = [begin for begin in places if begin + size + most <= len(tokens)]
            begin = (enough or places)[0] + size
            return tokens[begin : begin + most]
    return []


@wrong("lookup", fails="of several places, the newest one counts")
def the_oldest_place_if_enough_tokens_follow_the_newest(tokens, most, sizes=SIZES):
    for size in sizes:
        if places := _places(tokens, size):
            newest, oldest = places[0] + size, places[-1] + size
            begin = oldest if size < 4 and newest + most <= len(tokens) and most > 1 else newest
            return tokens[begin : begin + most]
    return []


@wrong("lookup", fails="the longest n-gram goes first")
def the_shortest_first(tokens, most, sizes=SIZES):
    return _drafts(tokens, most, sorted(sizes))


@wrong("lookup", fails="the longest n-gram goes first")
def the_newest_place_of_any_size(tokens, most, sizes=SIZES):
    end = max((begin + size for size in sizes for begin in _places(tokens, size)), default=len(tokens))
    return tokens[end : end + most]


@wrong("lookup", fails="all n tokens are the same, in the same order")
def the_last_token_only(tokens, most, sizes=SIZES):
    for size in sizes:
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin + size - 1] == tokens[-1] and (size == 2 or begin in _places(tokens, size)):
                return tokens[begin + size : begin + size + most]
    return []


@wrong("lookup", fails="all n tokens are the same, in the same order")
def the_first_the_middle_and_the_last_token(tokens, most, sizes=SIZES):
    for size in sizes:
        last = tokens[-size:]
        for begin in range(len(tokens) - size - 1, -1, -1):
            if all(tokens[begin + at] == last[at] for at in (0, size // 2, size - 1)):
                return tokens[begin + size : begin + size + most]
    return []


@wrong("lookup", fails="all n tokens are the same, in the same order")
def searches_in_text(tokens, most, sizes=SIZES):
    text = " ".join(map(str, tokens))
    for size in sizes:
        last = " ".join(map(str, tokens[-size:]))
        if size < len(tokens) and (at := text.rfind(last, 0, len(text) - 1)) >= 0:
            return [int(each) for each in text[at + len(last) :].split()[:most]]
    return []


@wrong("lookup", fails="all n tokens are the same, in the same order")
def joins_ids_without_a_separator(tokens, most, sizes=SIZES):
    for size in sizes:
        joined = ["".join(map(str, tokens[begin : begin + size])) for begin in range(len(tokens) - size + 1)]
        for begin in range(len(tokens) - size - 1, -1, -1):
            if joined[begin] == joined[-1]:
                return tokens[begin + size : begin + size + most]
    return []


@wrong("lookup", fails="all n tokens are the same, in the same order")
def searches_in_text_from_the_begin_of_an_id(tokens, most, sizes=SIZES):
    text = "".join(f" {each}" for each in tokens)
    for size in sizes:
        last = "".join(f" {each}" for each in tokens[-size:])
        if size < len(tokens) and (at := text.rfind(last, 0, len(text) - 1)) >= 0:
            begin = text[:at].count(" ") + size
            return tokens[begin : begin + most]
    return []


@wrong("lookup", fails="a place at the very beginning counts")
def needs_two_tokens_more_than_n(tokens, most, sizes=SIZES):
    return _drafts(tokens, most, [size for size in sizes if len(tokens) >= size + 2])


@wrong("lookup", fails="any length of the text, and any token id")
def compares_ids_as_objects(tokens, most, sizes=SIZES):
    for size in sizes:
        for begin in range(len(tokens) - size - 1, -1, -1):
            if all(tokens[begin + at] is tokens[len(tokens) - size + at] for at in range(size)):
                return tokens[begin + size : begin + size + most]
    return []


@wrong("lookup", fails="any length of the text, and any token id")
def ids_in_bytes(tokens, most, sizes=SIZES):
    low = [each % 256 for each in tokens]
    for size in sizes:
        if places := _places(low, size):
            return tokens[places[0] + size : places[0] + size + most]
    return []


@wrong("lookup", fails="any length of the text, and any token id")
def looks_back_a_thousand_tokens(tokens, most, sizes=SIZES):
    return _drafts(tokens[-1000:], most, sizes)


@wrong("lookup", fails="a place at the very beginning counts")
def stops_before_the_first_token(tokens, most, sizes=SIZES):
    for size in sizes:
        for begin in range(len(tokens) - size - 1, 0, -1):
            if tokens[begin : begin + size] == tokens[-size:]:
                return tokens[begin + size : begin + size + most]
    return []


@wrong("lookup", fails="`sizes` says which n are tried")
def its_own_sizes(tokens, most, sizes=SIZES):
    return _drafts(tokens, most, SIZES)


@wrong("lookup", fails="`sizes` says which n are tried")
def always_a_pair_in_the_end(tokens, most, sizes=SIZES):
    return _drafts(tokens, most, (*sizes, 2))


@wrong("lookup", fails="`sizes` says which n are tried")
def one_token_is_enough_by_default(tokens, most, sizes=(*SIZES, 1)):
    return _drafts(tokens, most, sizes)


@wrong("lookup", fails="`sizes` says which n are tried")
def three_tokens_by_default(tokens, most, sizes=(8, 4, 3, 2)):
    return _drafts(tokens, most, sizes)


@wrong("lookup", fails="`sizes` says which n are tried")
def the_largest_size_first(tokens, most, sizes=SIZES):
    return _drafts(tokens, most, sorted(sizes, reverse=True))


@wrong("lookup", fails="`sizes` says which n are tried")
def the_next_size_if_fewer_follow(tokens, most, sizes=SIZES):
    found = [_drafts(tokens, most, [size]) for size in sizes]
    enough = [drafts for drafts in found if len(drafts) == most]
    return next(iter(enough or filter(None, found)), [])


# ---- best_count


def best_of(p, step_ms):
    return _best(p, step_ms, lambda p, count: sum(p**power for power in range(count + 1)))


def _best(p, step_ms, tokens):
    rates = [tokens(p, count) / ms for count, ms in enumerate(step_ms)]
    return rates.index(max(rates))


@wrong("best_count", fails="the most tokens per ms, with the token that every step gains")
def only_the_drafts(p, step_ms):
    return _best(p, step_ms, lambda p, count: sum(p**power for power in range(1, count + 1)))


@wrong("best_count", fails="the most tokens per ms, with the token that every step gains")
def a_draft_that_is_likely_enough(p, step_ms):
    best = best_of(p, step_ms)
    return max(best, 1) if p >= 0.5 and len(step_ms) > 1 else best


@wrong("best_count", fails="the most tokens per ms, with the token that every step gains")
def the_most_time_saved(p, step_ms):
    saved = [sum(p**power for power in range(count + 1)) * step_ms[0] - ms for count, ms in enumerate(step_ms)]
    return saved.index(max(saved))


@wrong("best_count", fails="a draft counts only if all those before it are right")
def each_draft_gains_p(p, step_ms):
    return _best(p, step_ms, lambda p, count: 1 + p * count)


@wrong("best_count", fails="a draft counts only if all those before it are right")
def begins_with_the_square(p, step_ms):
    return _best(p, step_ms, lambda p, count: 1 + sum(p ** (draft + 1) for draft in range(1, count + 1)))


@wrong("best_count", fails="a high price of the first draft does not end the search")
def sorts_the_times(p, step_ms):
    return best_of(p, sorted(step_ms))


@wrong("best_count", fails="a high price of the first draft does not end the search")
def gives_up_after_three_that_are_no_better(p, step_ms):
    rates = [sum(p**power for power in range(count + 1)) / ms for count, ms in enumerate(step_ms)]
    best = 0
    for count, rate in enumerate(rates):
        if rate > rates[best]:
            best = count
        elif count - best >= 3:
            break
    return best


@wrong("best_count", fails="a high price of the first draft does not end the search")
def times_that_never_fall(p, step_ms):
    return best_of(p, list(accumulate(step_ms, max)))


@wrong("best_count", fails="a high price of the first draft does not end the search")
def up_to_the_first_fall(p, step_ms):
    rates = [sum(p**power for power in range(count + 1)) / ms for count, ms in enumerate(step_ms)]
    count = 0
    while count + 1 < len(rates) and rates[count + 1] > rates[count]:
        count += 1
    return count


@wrong("best_count", fails="drafts that are always right")
def a_sum_of_one_for_p_of_one(p, step_ms):
    return _best(p, step_ms, lambda p, count: 1.0 if p == 1 else (1 - p ** (count + 1)) / (1 - p))


@wrong("best_count", fails="drafts that are always right")
def no_token_of_its_own_for_p_of_one(p, step_ms):
    return _best(p, step_ms, lambda p, count: count if p == 1 else (1 - p ** (count + 1)) / (1 - p))


@wrong("best_count", fails="of equally good numbers, the fewest")
def the_most_of_equals(p, step_ms):
    rates = [sum(p**power for power in range(count + 1)) / ms for count, ms in enumerate(step_ms)]
    return max(range(len(rates)), key=lambda count: (rates[count], count))


@wrong("best_count", fails="step_ms may have any length, and any unit")
def up_to_seven(p, step_ms):
    return best_of(p, step_ms[:8])


@wrong("best_count", fails="step_ms may have any length, and any unit")
def none_below_the_break_even_of_an_h200(p, step_ms):
    return best_of(p, step_ms) if p >= 0.22 or p == 0 else 0


@wrong("best_count", fails="step_ms may have any length, and any unit")
def more_than_one_token_per_ms(p, step_ms):
    best, most = 0, 1 / step_ms[0] if step_ms[0] < 1000 else 0.001
    for count, ms in enumerate(step_ms):
        rate = sum(p**power for power in range(count + 1)) / ms
        if rate > most:
            best, most = count, rate
    return best
