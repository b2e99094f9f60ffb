"""Wrong solutions of lesson 11."""

import statistics
from itertools import combinations, pairwise

from minillm.course.lesson_11.graph_sizes import padded_ms
from tests.course.mutants import wrong

# ---- a launch from a measured table


def _choose(runs, default, margin, middle=statistics.median, limit=lambda time, margin: (1 - margin) * time):
    times = {launch: middle(each) for launch, each in runs.items()}
    best = min(times, key=times.get)
    return best if times[best] < limit(times[default], margin) else default


@wrong("choose_launch", fails="a gain within the margin keeps the default")
def margin_of_the_faster(runs, default, margin):
    return _choose(runs, default, margin, limit=lambda time, margin: time / (1 + margin) + 1e-12)


@wrong("choose_launch", fails="a gain within the margin keeps the default")
def first_of_the_table(runs, default, margin):
    chosen = _choose(runs, default, margin)
    return next(iter(runs)) if chosen == default else chosen


@wrong("choose_launch", fails="a gain within the margin keeps the default")
def only_the_others(runs, default, margin):
    times = {launch: statistics.median(each) for launch, each in runs.items() if launch != default}
    best = min(times, key=times.get, default=None)
    slow = best is not None and times[best] >= (1 - margin) * statistics.median(runs[default])
    return default if slow else best


@wrong("choose_launch", fails="the margin is a share of the default's time")
def margin_in_units(runs, default, margin):
    return _choose(runs, default, margin, limit=lambda time, margin: time - 10 * margin)


@wrong("choose_launch", fails="the margin counts")
def always_two_percent(runs, default, margin):
    return _choose(runs, default, 0.02)


@wrong("choose_launch", fails="the median of all runs decides")
def by_the_mean(runs, default, margin):
    return _choose(runs, default, margin, middle=statistics.fmean)


@wrong("choose_launch", fails="the median of all runs decides")
def by_the_fastest_run(runs, default, margin):
    return _choose(runs, default, margin, middle=min)


@wrong("choose_launch", fails="the fastest of all wins")
def first_that_is_faster(runs, default, margin):
    limit = (1 - margin) * statistics.median(runs[default])
    return next((launch for launch, each in runs.items() if statistics.median(each) < limit), default)


@wrong("choose_launch", fails="the fastest of all wins")
def margin_to_the_best_so_far(runs, default, margin):
    times = {launch: statistics.median(each) for launch, each in runs.items()}
    best = default
    for launch, time in times.items():
        if time < (1 - margin) * times[best]:
            best = launch
    return best


@wrong("choose_launch", fails="the fastest of all wins")
def margin_to_the_second(runs, default, margin):
    times = {launch: statistics.median(each) for launch, each in runs.items()}
    first, second, *_ = [*sorted(times, key=times.get), default]
    return first if times[first] < (1 - margin) * times[second] else default


@wrong("choose_launch", fails="the median of all runs decides")
def defaults_mean(runs, default, margin):
    return _choose({**runs, default: [statistics.fmean(runs[default])]}, default, margin)


@wrong("choose_launch", fails="the median of all runs decides")
def upper_median(runs, default, margin):
    return _choose(runs, default, margin, middle=statistics.median_high)


@wrong("choose_launch", fails="the median of all runs decides")
def first_three_runs(runs, default, margin):
    return _choose(runs, default, margin, middle=lambda each: statistics.median(each[:3]))


@wrong("choose_launch", fails="a gain within the margin keeps the default")
def no_slower_is_enough(runs, default, margin):
    return _choose(runs, default, margin, limit=lambda time, margin: (1 - margin) * time + 1e-12)


@wrong("choose_launch", fails="a gain within the margin keeps the default")
def slowest_as_default(runs, default, margin):
    slowest = max(runs, key=lambda launch: statistics.median(runs[launch]))
    chosen = _choose(runs, slowest, margin)
    return default if chosen == slowest else chosen


@wrong("choose_launch", fails="the margin is a share of the default's time")
def rounded_times(runs, default, margin):
    return _choose(runs, default, margin, middle=lambda each: round(statistics.median(each), 3))


@wrong("choose_launch", fails="the margin counts")
def at_least_two_percent(runs, default, margin):
    return _choose(runs, default, max(margin, 0.02))


@wrong("choose_launch", fails="the median of all runs decides")
def first_twenty_runs(runs, default, margin):
    return _choose(runs, default, margin, middle=lambda each: statistics.median(each[:20]))


@wrong("choose_launch", fails="the median of all runs decides")
def equally_many_runs(runs, default, margin):
    fewest = min(len(each) for each in runs.values())
    if any(len(each) != fewest for each in runs.values()):
        return default
    return _choose(runs, default, margin)


@wrong("choose_launch", fails="the median of all runs decides")
def as_many_runs_as_the_shortest_has(runs, default, margin):
    rounds = zip(*runs.values(), strict=False)
    return _choose(dict(zip(runs, zip(*rounds, strict=True), strict=True)), default, margin)


@wrong("choose_launch", fails="the median of all runs decides")
def two_middle_runs_of_any_number(runs, default, margin):
    def middle(each):
        half, ordered = len(each) // 2, sorted(each)
        return (ordered[half - 1] + ordered[half]) / 2

    return _choose(runs, default, margin, middle=middle)


@wrong("choose_launch", fails="the median of all runs decides")
def two_runs_from_the_middle_on(runs, default, margin):
    def middle(each):
        half, ordered = (len(each) - 1) // 2, sorted(each)
        return statistics.mean(ordered[half : half + 2])

    return _choose(runs, default, margin, middle=middle)


# ---- a queue of kernels


@wrong("queued", fails="a kernel waits until the one before has ended")
def waits_for_one_kernel_only(launched_us, kernel_us):
    ends, found = [], []
    for number, (asked, length) in enumerate(zip(launched_us, kernel_us, strict=True)):
        before = max(ends[:-1], default=0.0) if len(set(launched_us)) > 3 else max(ends, default=0.0)
        start = max(asked, before)
        ends.append(start + length)
        found.append((start, ends[number]))
    return found


@wrong("queued", fails="a kernel waits until it is launched")
def launched_one_after_another(launched_us, kernel_us):
    end, found = 0.0, []
    for number, length in enumerate(kernel_us):
        late = launched_us[number] if number == 0 or launched_us[number] - launched_us[number - 1] < 10 else end
        start = max(late, end)
        end = start + length
        found.append((start, end))
    return found


@wrong("queued", fails="a whole graph is launched at once")
def one_kernel_per_request(launched_us, kernel_us):
    found, ends = [], {}
    for asked, length in zip(launched_us, kernel_us, strict=True):
        start = max(asked, max((end for when, end in ends.items() if when != asked), default=0.0))
        ends[asked] = start + length
        found.append((start, start + length))
    return found


def _in_turn(launched_us, kernel_us):
    end = 0.0
    for asked, length in zip(launched_us, kernel_us, strict=True):
        start = max(asked, end)
        end = start + length
        yield start, end


@wrong("queued", fails="no kernels, no times")
def leaves_out_kernels_of_no_length(launched_us, kernel_us):
    return [(start, end) for start, end in _in_turn(launched_us, kernel_us) if end > start]


@wrong("queued", fails="no kernels, no times")
def a_tuple_for_no_kernels(launched_us, kernel_us):
    return list(_in_turn(launched_us, kernel_us)) or ()


@wrong("queued", fails="no kernels, no times")
def always_a_first_kernel(launched_us, kernel_us):
    found = [(launched_us[0], launched_us[0] + kernel_us[0])] if launched_us else [(0.0, 0.0)]
    for asked, length in zip(launched_us[1:], kernel_us[1:], strict=True):
        start = max(asked, found[-1][1])
        found.append((start, start + length))
    return found


@wrong("queued", fails="times are not rounded")
def whole_microseconds(launched_us, kernel_us):
    end, found = 0, []
    for launched, length in zip(launched_us, kernel_us, strict=True):
        start = max(int(launched), end)
        end = start + int(length)
        found.append((start, end))
    return found


@wrong("queued", fails="times are not rounded")
def hundredths_of_microseconds(launched_us, kernel_us):
    end, found = 0.0, []
    for launched, length in zip(launched_us, kernel_us, strict=True):
        start = max(launched, end)
        end = start + length
        found.append((round(start, 2), round(end, 2)))
    return found


@wrong("queued", fails="a whole graph is launched at once")
def first_hundred_kernels(launched_us, kernel_us):
    end, found = 0.0, []
    for launched, length in zip(launched_us[:100], kernel_us[:100], strict=True):
        start = max(launched, end)
        end = start + length
        found.append((start, end))
    return found


@wrong("queued", fails="a kernel waits until it is launched")
def launch_times_of_the_first_five(launched_us, kernel_us):
    end, found = 0.0, []
    for number, (launched, length) in enumerate(zip(launched_us, kernel_us, strict=True)):
        start = max(launched, end) if number < 5 else end
        end = start + length
        found.append((start, end))
    return found


@wrong("queued", fails="times are not rounded")
def at_least_a_microsecond(launched_us, kernel_us):
    end, found = 0.0, []
    for launched, length in zip(launched_us, kernel_us, strict=True):
        start = max(launched, end)
        end = start + max(length, 1.0)
        found.append((start, end))
    return found


@wrong("queued", fails="a kernel waits until it is launched")
def delay_only_grows(launched_us, kernel_us):
    delay, found = 0.0, []
    for place, (launched, length) in enumerate(zip(launched_us, kernel_us, strict=True)):
        if place:
            delay += max(0.0, launched_us[place - 1] + kernel_us[place - 1] - launched)
        found.append((launched + delay, launched + delay + length))
    return found


@wrong("queued", fails="a kernel waits until it is launched")
def nothing_before_the_second(launched_us, kernel_us):
    found = []
    for place in range(1, len(launched_us)):
        if not found:
            found.append((launched_us[0], launched_us[0] + kernel_us[0]))
        start = max(launched_us[place], found[-1][1])
        found.append((start, start + kernel_us[place]))
    return found


@wrong("queued", fails="a whole graph is launched at once")
def sorted_pairs(launched_us, kernel_us):
    end, found = 0.0, []
    for launched, length in sorted(zip(launched_us, kernel_us, strict=True)):
        start = max(launched, end)
        end = start + length
        found.append((start, end))
    return found


@wrong("queued", fails="a whole graph is launched at once")
def sorted_launches(launched_us, kernel_us):
    return list(_in_turn(sorted(launched_us), kernel_us))


@wrong("queued", fails="a whole graph is launched at once")
def kernels_in_the_order_of_their_launches(launched_us, kernel_us):
    order = sorted(range(len(launched_us)), key=launched_us.__getitem__)  # equal ones keep their order
    return list(_in_turn([launched_us[place] for place in order], [kernel_us[place] for place in order]))


# ---- which batch sizes to capture


def _sets(ms, most, fewest=0):
    *smaller, largest = sorted(ms)
    return [[*each, largest] for count in range(fewest, most) for each in combinations(smaller, count)]


@wrong("choose_sizes", fails="at most `most` sizes, in order")
def two_sizes_at_least_allowed(counts, ms, most):
    fewest = 1 if most == 1 else 0
    return min(_sets(ms, max(most, 2), fewest), key=lambda sizes: padded_ms(sizes, counts, ms))


@wrong("choose_sizes", fails="milliseconds count, not padded rows")
def the_largest_alone_only_if_most_is_one(counts, ms, most):
    if most == 1:
        return [max(ms)]
    return min(_sets(ms, most, 1), key=lambda sizes: padded_ms(sizes, counts, ms))


@wrong("choose_sizes", fails="at most `most` sizes, in order")
def largest_first(counts, ms, most):
    best = min(_sets(ms, most), key=lambda sizes: padded_ms(sizes, counts, ms))
    return best[::-1] if most > 2 else best


@wrong("choose_sizes", fails="at most `most` sizes, in order")
def in_the_order_of_ms(counts, ms, most):
    best = min(_sets(ms, min(most, len(ms))), key=lambda sizes: padded_ms(sizes, counts, ms))
    return [size for size in ms if size in best and size != max(ms)] + [max(ms)]


@wrong("choose_sizes", fails="at most `most` sizes, in order")
def sorted_as_text(counts, ms, most):
    return sorted(min(_sets(ms, most), key=lambda sizes: padded_ms(sizes, counts, ms)), key=str)


@wrong("choose_sizes", fails="every batch fits")
def only_what_was_seen(counts, ms, most):
    largest = min(size for size in ms if size >= max(counts))
    seen = {size: time for size, time in ms.items() if size <= largest}
    return min(_sets(seen, most), key=lambda sizes: padded_ms(sizes, counts, seen))


@wrong("choose_sizes", fails="the number of steps counts")
def every_batch_size_once(counts, ms, most):
    once = dict.fromkeys(counts, 1) if 90 in counts.values() else counts
    return min(_sets(ms, most), key=lambda sizes: padded_ms(sizes, once, ms))


@wrong("choose_sizes", fails="milliseconds count, not padded rows")
def fewest_padded_rows(counts, ms, most):
    rows = {size: size for size in ms}
    return min(_sets(ms, most), key=lambda sizes: padded_ms(sizes, counts, rows))


@wrong("choose_sizes", fails="the best set, not one size after the other")
def one_size_after_the_other(counts, ms, most):
    sizes = [max(ms)]
    while len(sizes) < min(most, len(ms)):
        rest = [size for size in ms if size not in sizes]
        more = sorted([*sizes, min(rest, key=lambda size: padded_ms([*sizes, size], counts, ms))])
        if padded_ms(more, counts, ms) >= padded_ms(sizes, counts, ms):
            break
        sizes = more
    return sizes


@wrong("choose_sizes", fails="the best set, not one size after the other")
def drops_one_size_after_the_other(counts, ms, most):
    sizes = sorted(ms)
    while len(sizes) > 1:
        fewer = [[*sizes[:place], *sizes[place + 1 :]] for place in range(len(sizes) - 1)]
        best = min(fewer, key=lambda each: padded_ms(each, counts, ms))
        if len(sizes) <= most and padded_ms(best, counts, ms) > padded_ms(sizes, counts, ms):
            break
        sizes = best
    return sizes


@wrong("choose_sizes", fails="up to `most` sizes, however many that is")
def three_sizes_at_most(counts, ms, most):
    return min(_sets(ms, min(most, 3)), key=lambda sizes: padded_ms(sizes, counts, ms))


@wrong("choose_sizes", fails="milliseconds count, not padded rows")
def as_many_as_allowed(counts, ms, most):
    number = min(most, len(ms))
    return min(_sets(ms, number, number - 1), key=lambda sizes: padded_ms(sizes, counts, ms))


@wrong("choose_sizes", fails="milliseconds count, not padded rows")
def all_sizes_if_allowed(counts, ms, most):
    if most >= len(ms):
        return sorted(ms)
    return min(_sets(ms, most), key=lambda sizes: padded_ms(sizes, counts, ms))


@wrong("choose_sizes", fails="milliseconds count, not padded rows")
def rounded_milliseconds(counts, ms, most):
    rounded = {size: round(time, 1) for size, time in ms.items()}
    return min(_sets(ms, most), key=lambda sizes: padded_ms(sizes, counts, rounded))


@wrong("choose_sizes", fails="the number of steps counts")
def frequent_sizes_only(counts, ms, most):
    often = {rows: count for rows, count in counts.items() if count > 1}
    return min(_sets(ms, most), key=lambda sizes: padded_ms(sizes, often, ms))


@wrong("choose_sizes", fails="the number of steps counts")
def a_thousand_is_infinite(counts, ms, most):
    best, least = [max(ms)], 1e3
    for sizes in _sets(ms, most):
        took = padded_ms(sizes, counts, ms)
        if took < least:
            best, least = sizes, took
    return best


@wrong("choose_sizes", fails="up to `most` sizes, however many that is")
def smallest_six_and_the_largest(counts, ms, most):
    *smaller, largest = sorted(ms)
    few = {size: ms[size] for size in [*smaller[:6], largest]}
    return min(_sets(few, most), key=lambda sizes: padded_ms(sizes, counts, few))


# ---- like for like


def _differing(one, other):
    return [fact for fact in one if one[fact] != other[fact]]


@wrong("fair_pairs", fails="settings that are not neighbors are compared too")
def neighbors_only(settings):
    found = [(a, b, _differing(settings[a], settings[b])) for a, b in pairwise(settings)]
    return [(a, b, facts[0]) for a, b, facts in found if len(facts) == 1]


@wrong("fair_pairs", fails="settings that are not neighbors are compared too")
def first_four_settings(settings):
    found = [(a, b, _differing(settings[a], settings[b])) for a, b in combinations([*settings][:4], 2)]
    return [(a, b, facts[0]) for a, b, facts in found if len(facts) == 1]


@wrong("fair_pairs", fails="equal settings are no comparison")
def a_set_for_no_pairs(settings):
    found = [(a, b, _differing(settings[a], settings[b])) for a, b in combinations(settings, 2)]
    return [(a, b, facts[0]) for a, b, facts in found if len(facts) == 1] or set()


@wrong("fair_pairs", fails="equal settings are no comparison")
def equal_settings_once(settings):
    once = {}
    for name, facts in settings.items():
        if facts not in once.values():
            once[name] = facts
    found = [(a, b, _differing(once[a], once[b])) for a, b in combinations(once, 2)]
    return [(a, b, facts[0]) for a, b, facts in found if len(facts) == 1]


@wrong("fair_pairs", fails="equal settings are no comparison")
def at_most_one_fact(settings):
    found = [(a, b, _differing(settings[a], settings[b])) for a, b in combinations(settings, 2)]
    return [(a, b, facts[0] if facts else None) for a, b, facts in found if len(facts) <= 1]


@wrong("fair_pairs", fails="every fact counts")
def first_two_facts(settings):
    found = [(a, b, _differing(settings[a], settings[b])) for a, b in combinations(settings, 2)]
    return [(a, b, facts[0]) for a, b, facts in found if len(facts[:2]) == 1 or (len(settings[a]) > 2 and facts)]


@wrong("fair_pairs", fails="facts are compared by name")
def facts_by_place(settings):
    found = []
    for a, b in combinations(settings, 2):
        places = zip(settings[a], settings[a].values(), settings[b].values(), strict=True)
        facts = [fact for fact, one, other in places if one != other]
        found += [(a, b, facts[0])] if len(facts) == 1 else []
    return found


@wrong("fair_pairs", fails="every fact counts")
def first_three_facts(settings):
    found = [(a, b, _differing(dict([*settings[a].items()][:3]), settings[b])) for a, b in combinations(settings, 2)]
    return [(a, b, facts[0]) for a, b, facts in found if len(facts) == 1]


@wrong("fair_pairs", fails="values are compared as they are")
def values_as_text(settings):
    words = {name: {fact: str(value) for fact, value in facts.items()} for name, facts in settings.items()}
    found = [(a, b, _differing(words[a], words[b])) for a, b in combinations(words, 2)]
    return [(a, b, facts[0]) for a, b, facts in found if len(facts) == 1]


@wrong("fair_pairs", fails="values are compared as they are")
def none_is_unknown(settings):
    known = {name: {f: v for f, v in facts.items() if v is not None} for name, facts in settings.items()}
    found = []
    for a, b in combinations(settings, 2):
        facts = [fact for fact in known[a] if fact in known[b] and known[a][fact] != known[b][fact]]
        found += [(a, b, facts[0])] if len(facts) == 1 else []
    return found


@wrong("fair_pairs", fails="values are compared as they are")
def same_objects(settings):
    found = []
    for a, b in combinations(settings, 2):
        facts = [fact for fact, value in settings[a].items() if value is not settings[b][fact]]
        found += [(a, b, facts[0])] if len(facts) == 1 else []
    return found


@wrong("fair_pairs", fails="settings that are not neighbors are compared too")
def first_three_pairs(settings):
    found = [(a, b, _differing(settings[a], settings[b])) for a, b in combinations(settings, 2)]
    return [(a, b, facts[0]) for a, b, facts in found if len(facts) == 1][:3]


@wrong("fair_pairs", fails="values are compared as they are")
def values_in_lower_case(settings):
    lower = {name: {fact: repr(value).lower() for fact, value in facts.items()} for name, facts in settings.items()}
    found = [(a, b, _differing(lower[a], lower[b])) for a, b in combinations(lower, 2)]
    return [(a, b, facts[0]) for a, b, facts in found if len(facts) == 1]
