"""Lesson 01: merging, learning merges."""

import functools
import sys
from collections.abc import Callable
from types import CodeType

from minillm.tokenizer import bpe, training

from ..shared.checks import Exercise
from . import vocabularies

SECONDS = 10  # a property takes milliseconds

bpe_merge = Exercise("bpe_merge", seconds=SECONDS)
learn_merges = Exercise("learn_merges", seconds=SECONDS)


def same(got: object, wanted: object) -> None:
    assert got == wanted, f"expected {wanted!r}, got {got!r}"


def calls_to(code: CodeType, run: Callable[[], object]) -> int:
    """Return how often a function with this code is called, under any name, during `run()`."""
    count = 0

    def notice(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code is code

    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def ranked(*pairs: str) -> dict[tuple[str, str], int]:
    """ "a b", "ab c" -> their ranks in that order."""
    halves = [pair.split() for pair in pairs]
    return {(left, right): rank for rank, (left, right) in enumerate(halves)}


# ---- bpe_merge(symbols, ranks)


@bpe_merge.example
def _(fn):
    same(fn(list("then"), ranked("t h", "e n")), ["th", "en"])


@bpe_merge.property(
    "the pair learned first is joined first",
    hint="of all adjacent pairs with a rank, which one comes first? Neither the leftmost nor the longest",
)
def _(fn):
    same(fn(list("abc"), ranked("b c", "a b")), ["a", "bc"])


@bpe_merge.property(
    "the rank is the number, whatever the order of the dict", hint="compare the values of `ranks`, not its keys' order"
)
def _(fn):
    same(fn(list("abc"), {("b", "c"): 1, ("a", "b"): 0}), ["ab", "c"])


@bpe_merge.property(
    "the list of merges may be long",
    hint="which number is larger than any rank? Gemma has hundreds of thousands of merges",
)
def _(fn):
    many = _many_ranks().copy()
    same(fn(list("abc"), many), ["ab", "c"])
    same(fn(list("yaby"), many), ["y", "ab", "y"])


@functools.cache
def _many_ranks() -> dict[tuple[str, str], int]:
    many = {("x", str(rank)): rank for rank in range(300_000)}
    return many | {("a", "b"): len(many), ("b", "c"): len(many) + 1}


@bpe_merge.property(
    "what a join makes can be joined again",
    hint="look at the pairs again after every single join: a new one may have the lowest rank now",
)
def _(fn):
    same(fn(list("low"), ranked("l o", "lo w")), ["low"])
    word = "".join(map(chr, range(0x4E00, 0x4E00 + 40)))  # a token may be long
    same(fn(list(word), {(word[:end], word[end]): end - 1 for end in range(1, len(word))}), [word])
    same(fn(list("abcd"), ranked("ab c", "a b", "c d")), ["abc", "d"])
    same(fn(list("abab"), ranked("ab a", "a b")), ["aba", "b"])
    same(fn(list("abcab"), ranked("abc a", "ab c", "a b")), ["abca", "b"])


@bpe_merge.property("a pair is joined wherever it occurs", hint="continue until no pair has a rank")
def _(fn):
    same(fn(list("abxab"), ranked("a b")), ["ab", "x", "ab"])
    same(fn(list("abxcd"), ranked("c d", "a b")), ["ab", "x", "cd"])
    found = fn(list("ab" * 150), ranked("a b"))  # within the limit of a recursion
    assert found == ["ab"] * 150, f'"ab" 150 times became {found.count("ab")} "ab" and {len(found)} symbols in all'


@bpe_merge.property(
    "where places overlap, the left one is joined",
    hint='"aaa" contains ("a", "a") twice, but only one can be joined',
)
def _(fn):
    same(fn(list("aaa"), ranked("a a")), ["aa", "a"])


@bpe_merge.property(
    "only a pair that has a rank is joined",
    hint='("a", "bc") and ("ab", "c") spell the same text, but they are different pairs',
)
def _(fn):
    same(fn(list("abc"), ranked("b c", "ab c")), ["a", "bc"])
    same(fn(list("babxab"), ranked("b a", "a b")), ["ba", "b", "x", "ab"])
    same(fn(list("acab"), ranked("a b")), ["a", "c", "ab"])
    if fn(["ab", "x"], {}) == ["ab", "x"]:  # how symbols are split is another property's
        same(fn(["ab", "c", "a", "bc"], ranked("a bc")), ["ab", "c", "abc"])


@bpe_merge.property(
    "a symbol may have several characters",
    hint='"<0xC3>" is one symbol, the token of a byte: begin with the symbols as they are',
)
def _(fn):
    same(fn(["th", "en"], ranked("e n")), ["th", "en"])
    same(fn(["<0xC3>", "<0xA9>", "s"], ranked("<0xC3> <0xA9>")), ["<0xC3><0xA9>", "s"])


@bpe_merge.property("a word may have nothing to join", hint="an empty list and a single symbol have no pair")
def _(fn):
    for symbols in ([], ["a"], ["x", "y"], ["\n", " "]):
        same(fn(list(symbols), ranked("a b")), symbols)


@bpe_merge.property("the joins are your own", hint="write the rule in Python: `merge` is the engine's solution")
def _(fn):
    for given in (bpe.merge, vocabularies.scanning_merge):
        calls = calls_to(given.__code__, lambda: fn(list("then"), ranked("t h", "e n")))
        assert not calls, f"it calls {given.__name__}, which merges for it"


@bpe_merge.property("each call makes a list of its own", hint="start from a copy of the list in every call")
def _(fn):
    ranks = ranked("t h", "e n")
    first = fn(list("then"), ranks)
    wanted = list(first)
    first.append("and")
    again = fn(list("then"), ranks)
    assert again == wanted, f"the caller added to a result, and the same call now returns {again!r}, not {wanted!r}"


@bpe_merge.property("the arguments do not change", hint="work on a copy of the list")
def _(fn):
    symbols = list("then")
    fn(symbols, ranked("t h", "e n"))
    assert symbols == list("then"), f"the caller's {list('then')} is now {symbols}"
    ranks = ranked("t h", "e n")
    fn(list("then"), ranks)
    assert ranks == ranked("t h", "e n"), f"the caller's ranks are now {ranks}"


# ---- learn_merges(word_counts, steps)


@learn_merges.example
def _(fn):
    same(fn({"tide": 4, "tin": 1}, 1), [("t", "i")])


@learn_merges.property("a word counts as often as it occurs", hint="a pair in a frequent word is a frequent pair")
def _(fn):
    same(fn({"xy": 10, "abz": 4, "abw": 4}, 1), [("x", "y")])
    same(fn({"xy": 10, "abz": 400_000, "abw": 1}, 1), [("a", "b")])  # the same words with other counts
    same(fn({"xy": 400_001, "abz": 200_000, "abw": 200_000}, 1), [("x", "y")])


@learn_merges.property(
    "no pair reaches across words",
    hint="count inside each word, and stop when no word has a pair left",
)
def _(fn):
    same(fn({"ab": 3, "cd": 1}, 10), [("a", "b"), ("c", "d")])
    same(fn({"\n\n": 4, "▁A": 3, "▁a": 2}, 9), [("\n", "\n"), ("▁", "A"), ("▁", "a")])


@learn_merges.property(
    "of equal counts, the pair that sorts first wins",
    hint="compare the pairs as tuples, only where the counts are equal",
)
def _(fn):
    for words in (["zy", "ab"], ["ab", "zy"], ["az", "ab"], ["yb", "az"], ["ab", "Zy"]):
        same(fn(dict.fromkeys(words, 2), 2), [tuple(word) for word in sorted(words)])
    same(fn({"abz": 1, "ab": 1, "ac": 1}, 2), [("a", "b"), ("a", "c")])
    found = fn({"abz": 1, "ab": 1, "cd": 1}, 2)
    assert found[1:] != [("c", "d")], 'after ("a", "b"), ("ab", "z") and ("c", "d") occur once each; it took ("c", "d")'


@learn_merges.property(
    "counts follow each join",
    hint='once ("a", "b") is joined, "abc" no longer contains ("b", "c"), but it contains ("ab", "c")',
)
def _(fn):
    same(fn({"abc": 10, "ab": 2, "xy": 7}, 2), [("a", "b"), ("ab", "c")])


@learn_merges.property(
    "a pair is joined at all its places in a word",
    hint="a word may contain a pair twice",
)
def _(fn):
    same(fn({"abxabyabz": 5, "ab": 4, "pq": 7, "pqr": 1}, 2), [("a", "b"), ("p", "q")])
    found = fn({"abab": 5}, 2)
    assert found[1:] != [("a", "b")], f'"abab" still contains ("a", "b") after that merge; it learned {found!r}'


@learn_merges.property(
    "a pair counts at every place in a word", hint='"ababab" contains ("a", "b") three times, "aaa" ("a", "a") twice'
)
def _(fn):
    same(fn({"ababab": 2, "cd": 5}, 1), [("a", "b")])
    same(fn({"aaa": 2, "cd": 3}, 1), [("a", "a")])


@learn_merges.property(
    "only whole symbols are joined", hint='["ba", "b"] does not contain the pair ("a", "b"): compare symbols, not text'
)
def _(fn):
    words = ["bad", "baf", "bah", "babc", "ba", "abe", "abg", "ab", "bc"]
    same(fn(dict.fromkeys(words, 1), 3), [("b", "a"), ("a", "b"), ("b", "c")])
    for first, second in ((".x", "ax"), ("ab", "\n\n")):
        found = fn({first: 2, second: 1}, 2)
        assert len(found) == 2, f"after {tuple(first)}, {second!r} still contains {tuple(second)}; it learned {found!r}"


@learn_merges.property(
    "where places overlap, the left one is joined", hint='join_pair joins from the left: "aaa" becomes "aa" and "a"'
)
def _(fn):
    found = fn({"aaa": 3}, 2)
    assert found[1:] != [("a", "aa")], f'"aaa" has only ("aa", "a") left after the first merge; it learned {found!r}'


@learn_merges.property(
    "there may be many words and long tokens", hint="only `steps` and the pairs that are left limit what is learned"
)
def _(fn):
    words = {chr(0x4E00 + 2 * i) + chr(0x4E01 + 2 * i): 1 for i in range(150)}
    found = fn(words, 150)
    assert len(found) == 150, f"150 words of two different characters give 150 merges, not {len(found)}"
    found = len(fn({"".join(map(chr, range(0x4E00, 0x4E00 + 60))): 1}, 100))
    assert found == 59, f"a word of 60 different characters is one token after 59 merges; it learned {found}"


@learn_merges.property("the counting is your own", hint="write the steps in Python; only `join_pair` is given")
def _(fn):
    for given in (training.most_frequent_pairs, vocabularies.counting_learn):
        calls = calls_to(given.__code__, lambda: fn({"tide": 4, "tin": 1}, 1))
        assert not calls, f"it calls {given.__name__}, which learns the merges for it"


@learn_merges.property("each call makes a list of its own", hint="keep nothing from one call to the next")
def _(fn):
    fn({"tide": 4, "tin": 1}, 1).append(("the caller", "appends"))
    same(fn({"tide": 4, "tin": 1}, 1), [("t", "i")])


@learn_merges.property("the caller's counts do not change", hint="work on lists of your own")
def _(fn):
    counts = {"abc": 10, "ab": 2, "xy": 7}
    same(fn(counts, 0), [])
    fn(counts, 2)
    assert counts == {"abc": 10, "ab": 2, "xy": 7}, f"the caller's word_counts is now {counts}"
