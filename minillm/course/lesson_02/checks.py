"""Attention over a sequence, a cache of keys and values, attention over the cache, and its size.  Lesson 02."""

import itertools
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import torch
from torch import Tensor

from ..shared.checks import Exercise, a_type, assert_int
from ..shared.differences import text
from .attention_calls import (
    DIM,
    LONG,
    TOLERANCE,
    Attend,
    assert_later_hidden,
    assert_past_seen,
    assert_values_used,
    differs,
    normal,
    over_cache,
    over_prompt,
    plain,
    same,
)
from .cache_calls import KV_HEADS, NUMBERS, Largest, cache_of, call, numbers, tokens

SECONDS = 20.0

# ---- what holds for attention with a cache as without one

attention = Exercise("attention", seconds=SECONDS)
cached_attention = Exercise("cached_attention", seconds=SECONDS)


def _both(name: str, hint: str) -> Callable:
    """A decorator that adds a property to both exercises."""

    def add(holds: Callable[[Attend], bool | None]) -> Callable:
        attention.property(name, hint)(lambda function: holds(plain(function)))
        cached_attention.property(name, hint)(lambda function: holds(over_prompt(function)))
        return holds

    return add


def _example(attend: Attend) -> None:
    q, k, v = normal(1, 2, DIM), normal(1, 1, DIM, seed=1), normal(1, 1, DIM, seed=2)
    alone = attend(q, k, v, 1.0)
    want = v.expand(1, 2, DIM)
    assert not (said := differs(alone, want)), f"a single token must get its own value: {said}"
    # Four tokens; the last one's query matches the second one's key: it gets nearly that token's value.
    q, k, v = torch.zeros(3, 4, 1, DIM, dtype=torch.float64)
    q[3, 0, 0], k[1, 0, 0], v[:, 0, :4] = 30.0, 1.0, torch.eye(4)
    got = attend(q, k, v, 1.0)[3, 0, :4]
    assert got[1] > 0.99, f"the last of four tokens must take nearly all from token 1: {text(got)}, not [0, 1, 0, 0]"


attention.example(lambda function: _example(plain(function)))
cached_attention.example(lambda function: _example(over_prompt(function)))


@_both(
    "the weights are the softmax of scale · q · k over the keys",
    hint="compare with the three tokens above: a score for every key, times `scale`, then a softmax over the keys",
)
def _(attend):
    q, k = normal(3, 1, DIM), normal(3, 1, DIM, seed=1)
    for scale in (0.0625, 1.0):  # the first is Gemma 2B's: too small to be rounded
        got = attend(q, k, torch.eye(3, DIM, dtype=torch.float64)[:, None], scale)[2, 0, :3]
        scores = k[:, 0] @ q[2, 0]
        want = torch.softmax(scores * scale, 0)
        assert abs(got.sum() - 1) < TOLERANCE, f"the last query's weights are {text(got)}: their sum is not 1"
        near = f"with a scale of {scale}, the last query's weights: {differs(got, want)}"
        for factor, what in ((1.0, "1"), (DIM**-0.5, "1 / sqrt(d)"), (scale * DIM**-0.5, "scale / sqrt(d)")):
            if factor != scale and same(got, torch.softmax(scores * factor, 0)):
                near += f". These are the weights for a scale of {what}"
        assert same(got, want), near


@attention.property(
    "every query sees every key up to its own",
    hint="the sum runs over j ≤ i: from the very first token to the query's own, both included",
)
def _(function):
    for length, keys in ((5, range(5)), (LONG, (0, LONG // 2))):
        assert_past_seen(plain(function), length, length, keys)


LATER = (
    "a key with j > i must get a weight of exactly 0, whatever it or the others score: hide its score, before the "
    "softmax. Which number is lower than every score?"
)


@attention.property("no query sees a later key", hint=LATER)
def _(function):
    attend = plain(function)
    assert_values_used(attend)
    for length, first_hidden in ((5, range(1, 5)), (LONG, (1, LONG // 2, LONG - 1))):
        assert_later_hidden(attend, length, length, first_hidden)


@_both(
    "every head uses its own query, and its group's keys and values",
    hint="compute one head alone and compare; with 4 heads and 2 KV heads, heads 0 and 1 read KV head 0, heads 2 and "
    "3 KV head 1. If the numbers are right and in the wrong places, look at the last reshape",
)
def _(attend):
    assert_values_used(attend)
    for heads, kv_heads in ((2, 1), (4, 2), (3, 3), (8, 1), (12, 2)):
        q, k, v = (normal(3, n, DIM, seed=s) for s, n in enumerate((heads, kv_heads, kv_heads)))
        out = attend(q, k, v, 0.5)
        # Each head's output, were it alone: [query head, keys' head, values' head] -> [tokens, d]
        alone = {
            (i, j, m): attend(q[:, i : i + 1], k[:, j : j + 1], v[:, m : m + 1], 0.5)[:, 0]
            for i, j, m in itertools.product(range(heads), range(kv_heads), range(kv_heads))
        }
        for head in range(heads):
            want = (head, head * kv_heads // heads, head * kv_heads // heads)
            if not same(out[:, head], alone[want]):
                used = next((each for each, result in alone.items() if same(out[:, head], result)), None)
                got = "something else" if used is None else "query {}, keys {} and values {}".format(*used)
                raise AssertionError(
                    f"{heads} heads, {kv_heads} KV heads: head {head} must use query {want[0]}, keys {want[1]} and "
                    f"values {want[2]}; it uses {got}"
                )


@_both(
    "large scores do not overflow",
    hint="exp(1000) is inf. A softmax stays the same when all of a query's scores in a head are lowered by "
    "the same number",
)
def _(attend):
    assert_values_used(attend)
    for heads in (1, 2):
        q, k, v = normal(4, heads, DIM), normal(4, 1, DIM, seed=1), normal(4, 1, DIM, seed=2)
        q[..., 0] = torch.eye(heads)[0]  # 1 in head 0, 0 in head 1
        usual = attend(q, k, v, 1.0)[-1]  # the last query's: nothing is hidden from it
        where = "" if heads == 1 else " in one head of two, and small ones in the other,"
        for shift in (1000.0, -1000.0):
            moved = k.clone()
            moved[..., 0] += shift  # adds `shift` to every score of head 0
            out = attend(q, moved, v, 1.0)[-1]
            assert out.isfinite().all(), f"scores around {shift:g}{where} gave nan or inf"
            said = differs(out, usual, 1e-2)
            assert not said, f"with {shift:g} added to all scores of a query in head 0, of {heads}: {said}"


@_both(
    "the result has the dtype of q",
    hint="torch.zeros and torch.tensor make float32 unless told otherwise: pass dtype=q.dtype. What you compute in "
    "another dtype must be converted back",
)
def _(attend):
    assert_values_used(attend)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        q, k, v = (normal(3, 1, DIM, seed=s).to(dtype) for s in range(3))
        got = attend(q, k, v, 0.5).dtype
        assert got == dtype, f"for {dtype} inputs the result is {got}"


@attention.property("its arguments are unchanged", hint="`q *= scale` and `k[...] = ` write into the caller's tensors")
def _(function):
    _assert_unchanged(function, normal(3, 1, DIM), normal(3, 1, DIM, seed=1), normal(3, 1, DIM, seed=2))


def _assert_unchanged(function: Callable, *tensors: Tensor, length: tuple[int, ...] = ()) -> None:
    assert_values_used(over_prompt(function) if length else plain(function))
    for dtype in (torch.float64, torch.float32):  # a conversion copies only if the dtype differs
        given, copies = ([tensor.to(dtype, copy=True) for tensor in tensors] for _ in range(2))
        function(*given, *length, scale=0.7)  # x * 0.7 / 0.7 is not always x
        for name, tensor, copy in zip("qkv", given, copies, strict=True):
            kept = torch.allclose(tensor, copy, rtol=0, atol=0, equal_nan=True)
            assert kept, f"after the call {name} is no longer what it was"


# ---- a cache of keys and values

append = Exercise("append", returns=False, seconds=SECONDS)


@append.example
def _(function):
    cache = cache_of(4)
    shape = (1, KV_HEADS, NUMBERS)
    call(function, cache, torch.full(shape, 7.0), torch.full(shape, 7.0))
    got = numbers(cache.k)
    assert got == [7, 0, 0, 0], f"a key of 7 in an empty cache of 4: the slots must hold [7, 0, 0, 0], not {got}"
    assert cache.length == 1, f"one token was appended: the length must be 1, not {cache.length}"


@append.property(
    "new tokens follow the old ones",
    hint="which slot is the first free one? The slots after the new tokens are not yours to write",
)
def _(function):
    cache = cache_of(6, count=2)
    cache.k[2:] = cache.v[2:] = -1.0
    call(function, cache, tokens(3.0), tokens(3.0))
    got, want = numbers(cache.k), [1, 2, 3, -1, -1, -1]
    assert got == want, f"key 3 appended to keys 1 and 2 (-1: left from before): the slots must hold {want}, not {got}"
    cache = cache_of(6, count=2)
    call(function, cache, tokens(3.0, 4.0), tokens(3.0, 4.0))
    got = numbers(cache.k)
    # Whether all of a group are kept is another property.
    kept = got[:2] == [1, 2] and got[2] in (3, 4) and got[4:] == [0, 0]
    assert kept, f"keys 3 and 4 appended at once to keys 1 and 2: the slots must hold [1, 2, 3, 4, 0, 0], not {got}"


@append.property("the length counts tokens", hint="it is not the number of calls: several tokens may come at once")
def _(function):
    cache = cache_of(6)
    call(function, cache, tokens(1.0, 2.0, 3.0), tokens(1.0, 2.0, 3.0))
    assert cache.length == 3, f"three tokens were appended at once: the length must be 3, not {cache.length}"
    cache = cache_of(6, count=4)
    cache.k[4:] = cache.v[4:] = -1.0  # left from before
    call(function, cache, tokens(5.0), tokens(5.0))
    assert cache.length == 5, f"one token was appended to four: the length must be 5, not {cache.length}"
    cache = cache_of(6, count=2)
    call(function, cache, tokens(3.0, 4.0), tokens(3.0, 4.0))
    assert cache.length == 4, f"two tokens were appended to two: the length must be 4, not {cache.length}"
    assert isinstance(cache.length, int), f"the length must stay an int, and is {a_type(cache.length)}"


@append.property(
    "tokens that come together are all kept", hint="each token takes one slot, for its key as for its value"
)
def _(function):
    cache = cache_of(6)
    call(function, cache, tokens(1.0, 2.0, 3.0), tokens(1.0, 2.0, 3.0))
    for name, got in (("keys", numbers(cache.k)), ("values", numbers(cache.v))):
        assert got == [1, 2, 3, 0, 0, 0], f"{name} 1, 2 and 3 appended to an empty cache: it holds {got}"
    prompt, cache = list(range(1, 151)), cache_of(200)
    call(function, cache, tokens(*prompt), tokens(*prompt))
    for name, got in (("keys", numbers(cache.k)), ("values", numbers(cache.v))):
        kept = sum(mine == its for mine, its in zip(got, prompt, strict=False))
        assert kept == 150, f"of 150 {name} appended to an empty cache of 200, {kept} are in their slots"


@append.property("values are kept as well as keys", hint="a token's key and value belong in slots of the same number")
def _(function):
    cache = cache_of(6, count=2)
    call(function, cache, tokens(3.0), tokens(30.0))
    keys, values = numbers(cache.k), numbers(cache.v)
    assert values == [10 * key for key in keys], f"each value must be ten times its key; keys {keys}, values {values}"


@append.property("all KV heads are kept", hint="a slot holds [kv_heads, d] numbers")
def _(function):
    cache = cache_of(2)
    call(function, cache, tokens(1.0), tokens(1.0))
    for name, memory in (("key", cache.k), ("value", cache.v)):
        got, want = memory[0].tolist(), tokens(1.0)[0].tolist()
        assert got == want, f"the {name} {want}, of {KV_HEADS} heads, is kept as {got}"


@append.property("numbers are kept in full precision", hint="the cache's dtype decides; convert nothing before")
def _(function):
    cache = cache_of(2)
    cache.k, cache.v = cache.k.double(), cache.v.double()
    third = torch.full((1, KV_HEADS, NUMBERS), 1 / 3, dtype=torch.float64)
    call(function, cache, third, third)
    for name, kept in (("key", cache.k[0, 0, 0].item()), ("value", cache.v[0, 0, 0].item())):
        assert kept == 1 / 3, f"in a float64 cache, a {name} of {1 / 3:.12f} is kept as {kept:.12f}"


@append.property("its arguments k and v are unchanged", hint="copy out of them; `k.zero_()` or `k *= ` changes them")
def _(function):
    k, v = tokens(3.0), tokens(30.0)
    call(function, cache_of(6, count=2), k, v)
    for name, tensor, copy in (("k", k, tokens(3.0)), ("v", v, tokens(30.0))):
        assert torch.equal(tensor, copy), f"after the call {name} is no longer what it was"


@append.property("a cache can be filled to its last slot", hint="a token that takes the last slot still fits")
def _(function):
    try:
        call(function, cache_of(3, count=1), tokens(2.0, 3.0), tokens(20.0, 30.0))
    except ValueError:
        raise AssertionError("two tokens after one in a cache of three raised ValueError") from None


@append.property(
    "a full cache raises ValueError and stays as it is",
    hint="find out whether all the new tokens fit before you change anything",
)
def _(function):
    for capacity, filled, new in ((3, 2, (8.0, 9.0)), (5, 4, (8.0, 9.0)), (3, 3, (8.0,))):
        cache, before = (cache_of(capacity, count=filled) for _ in range(2))
        try:
            function(cache, tokens(*new), tokens(*(10 * number for number in new)))
        except ValueError:
            expected = f"ValueError was raised, and the length changed from {before.length} to {cache.length}"
            assert cache.length == before.length, expected
            same = cache.k.equal(before.k) and cache.v.equal(before.v)
            assert same, f"ValueError was raised, and the slots changed: {numbers(cache.k)}, {numbers(cache.v)}"
        else:
            free = f"{capacity - filled or 'no'} free slot{'s' * (filled == capacity)} of {capacity}"
            count = f"{len(new)} new token{'s' * (len(new) > 1)}"
            raise AssertionError(f"{count} and {free}: no ValueError was raised, and the length is now {cache.length}")


@append.property(
    "memory is written in place, and earlier tokens are not copied",
    hint="torch.cat makes a new tensor and copies all earlier tokens, at every step; write into the one that is there",
)
def _(function):
    full = cache_of(3)
    memory = full.k.data_ptr(), full.v.data_ptr()
    with suppress(ValueError):  # another property says that they fit
        function(full, tokens(1.0, 2.0, 3.0), tokens(10.0, 20.0, 30.0))
    now = full.k.data_ptr(), full.v.data_ptr()
    assert now == memory, "when the tokens fill an empty cache, cache.k or cache.v is another tensor than before"
    cache = cache_of(100, count=90)
    places = cache.k.data_ptr(), cache.v.data_ptr()
    writes = cache.k._version + cache.v._version
    with Largest(cache) as made:
        function(cache, tokens(91.0), tokens(910.0))
    writes = cache.k._version + cache.v._version - writes
    assert cache.length != 90 or cache.k[90].any(), "the call changed nothing in the cache"
    now = cache.k.data_ptr(), cache.v.data_ptr()
    assert now == places and len(cache.k) == len(cache.v) == 100, "cache.k or cache.v is another tensor than before"
    limit = cache.k.numel() // 2
    assert made.numbers < limit, f"one token was appended to 90, and a new tensor of {made.numbers} numbers was made"
    assert writes < 90, f"one token was appended to 90, and slots were written {writes} times"


# ---- attention over a cache: what does not hold without one


def _filled(capacity: int) -> tuple[Tensor, Tensor]:
    return normal(capacity, 1, DIM, seed=1), normal(capacity, 1, DIM, seed=2)


@cached_attention.property(
    "every new query sees its whole past",
    hint="query i of n is at position length - n + i, not at i; `length` grows from call to call",
)
def _(function):
    for queries, length in ((1, 5), (1, 7), (3, 5), (3, 7)):  # a cache that fills up: the shapes stay the same
        assert_past_seen(over_cache(function, length), queries, length, range(length), capacity=9)
    for queries, length, keys in ((1, 6, range(6)), (3, 6, range(6)), (6, 6, range(6)), (1, LONG, (0, LONG // 2))):
        assert_past_seen(over_cache(function, length), queries, length, keys)
    assert_past_seen(over_cache(function, LONG), LONG // 2, LONG, (0, LONG // 2))


@cached_attention.property(
    "no query sees the keys after its own", hint=f"query i of n is at position length - n + i. A{LATER[1:]}"
)
def _(function):
    assert_values_used(over_prompt(function))
    for queries in (3, 6):
        for capacity in (6, 7, 9):  # the last slots may be free
            assert_later_hidden(over_cache(function, 6), queries, 6, range(6 - queries + 1, 6), capacity)
    assert_later_hidden(over_cache(function, LONG), LONG // 2, LONG, (LONG // 2 + 1, LONG - 1))


@cached_attention.property(
    "slots beyond the length never matter, not even with NaN in them",
    hint="a key of zeros has a score of 0, and exp(0) is 1. And with a weight of 0, slots still take part in the sum: "
    "0 * NaN and 0 * inf are NaN. Keep them out of it",
)
def _(function):
    attend = over_cache(function, 5)
    assert_values_used(over_prompt(function))
    ones = torch.ones(9, 1, DIM, dtype=torch.float64)  # as values: each output is the sum of its weights
    for queries in (1, 3):
        q, (k, v) = normal(queries, 1, DIM), _filled(9)
        shared = same(attend(q, k, ones * (torch.arange(9) < 5)[:, None, None], 0.5), attend(q, k[:5], ones[:5], 0.5))
        assert shared, "slots beyond the length took a share of the weights"
        before = attend(q, k, v, 0.5)
        for left_k, left_v in ((3.0, 1e4), (torch.nan, torch.nan), (torch.inf, torch.inf)):
            k[5:], v[5:] = left_k, left_v
            said = differs(attend(q, k, v, 0.5), before)
            assert not said, f"slots beyond the length with {left_v:g} in them changed the output: {said}"
        for name in ("value", "key"):
            k, v = _filled(9)
            (k if name == "key" else v)[0] = torch.nan  # of a token that all queries see
            assert attend(q, k, v, 0.5).isnan().all(), (
                f"a NaN in a {name} that the queries see has vanished: choose what to clear by its position"
            )


@cached_attention.property(
    "its arguments are unchanged",
    hint="`q *= scale` and `k[...] = ` write into the caller's tensors; free slots are not yours to clear either",
)
def _(function):
    k, v = _filled(8)
    k[6:], v[6], v[7] = torch.nan, torch.nan, torch.inf  # as free slots may be
    _assert_unchanged(function, normal(2, 1, DIM), k, v, length=(5,))


# ---- how many requests fit

requests_that_fit = Exercise("requests_that_fit", seconds=SECONDS)

GB = 10**9


def _shape(layers: int = 10, heads: int = 4, kv_heads: int = 4, head_dim: int = 100) -> SimpleNamespace:
    """With these, 2 bytes a number: 16,000 bytes a token."""
    return SimpleNamespace(num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)


def _fit(function, shape: SimpleNamespace, parameters: float, gpu_bytes: float, context: int, **options) -> float:
    options = {"utilization": 1.0} | options
    return function(shape, parameters=parameters, gpu_bytes=gpu_bytes, context=context, **options)


def _expect(got: float, want: int, what: str) -> None:
    assert got == want, f"{what}: {want} requests fit, not {got}"


@requests_that_fit.example
def _(function):
    # 70 billion parameters, 141 GB, on a GPU of 80 GB; even without them, a million tokens would not fit.
    llama = _shape(layers=80, heads=64, kv_heads=8, head_dim=128)
    many = function(llama, parameters=70.6 * GB, gpu_bytes=80 * GB, context=1_000_000)
    _expect(many, 0, "weights of 141 GB on an 80 GB GPU")


@requests_that_fit.property("keys and values both count", hint="what does a layer keep of a token?")
def _(function):
    one = _shape(layers=1, heads=1, kv_heads=1, head_dim=1)
    _expect(_fit(function, one, 0, 400, 1), 100, "a token, its key and its value one number each, 400 bytes")


@requests_that_fit.property(
    "every layer, every number of a head and every token counts",
    hint="is the whole formula there?",
)
def _(function):
    once = _fit(function, _shape(), 0, 1.6 * GB, 1000)
    twice = {
        "layers": _fit(function, _shape(layers=20), 0, 1.6 * GB, 1000),
        "numbers in a head": _fit(function, _shape(head_dim=200), 0, 1.6 * GB, 1000),
        "tokens": _fit(function, _shape(), 0, 1.6 * GB, 2000),
    }
    for what, got in twice.items():
        assert got * 2 == once, f"{once} requests fit, and with twice the {what} {got}"


@requests_that_fit.property(
    "KV heads are cached, not query heads",
    hint="a query is used once and not kept: which heads' numbers are?",
)
def _(function):
    few = _fit(function, _shape(heads=4, kv_heads=1), 0, 1.6 * GB, 1000)
    same = _fit(function, _shape(heads=1, kv_heads=1), 0, 1.6 * GB, 1000)
    assert few == same, f"with 4 query heads {few} requests fit, with 1 {same}; both have one KV head"
    all_heads = _fit(function, _shape(heads=4, kv_heads=4), 0, 1.6 * GB, 1000)
    assert all_heads * 4 == few, f"with 1 KV head {few} requests fit, with 4 {all_heads}"


@requests_that_fit.property("the bytes of a number count", hint="bytes_each holds for the cache and for the weights")
def _(function):
    half = _fit(function, _shape(), 0.4 * GB, 3.2 * GB, 1000, bytes_each=2)
    full = _fit(function, _shape(), 0.4 * GB, 6.4 * GB, 1000, bytes_each=4)
    assert full == half, f"{half} requests fit with 2 bytes a number; with 4, on a GPU twice as large, {full}"
    small = _fit(function, _shape(), 0.4 * GB, 0.8 * GB, 1000, bytes_each=0.5)
    assert small == half, f"{half} requests fit with 2 bytes a number; with 0.5, on a GPU a quarter as large, {small}"


@requests_that_fit.property("the weights come first", hint="what they take is not free for the cache")
def _(function):
    for gpu in (3.2 * GB, 640 * GB):
        empty, loaded = (_fit(function, _shape(), size, gpu, 1000) for size in (0, gpu / 4))
        assert loaded * 2 == empty, f"{empty} requests fit without weights, {loaded} when weights take half of the GPU"
    _expect(_fit(function, _shape(), 2 * GB, 3.2 * GB, 1000), 0, "weights of 4 GB on a GPU of 3.2 GB")
    none = _fit(function, _shape(), 1.5 * GB, 3.2 * GB, 1000, utilization=0.9)
    assert none >= 0, f"weights of 3 GB where 90% of 3.2 GB may be used: {none} requests, a negative number"


@requests_that_fit.property(
    "only the utilized share is used",
    hint="it limits the weights and the cache together",
)
def _(function):
    whole = _fit(function, _shape(), 0.4 * GB, 1.6 * GB, 1000)
    for share, words in ((0.5, "half of one twice as large"), (0.25, "a quarter of one four times as large")):
        part = _fit(function, _shape(), 0.4 * GB, 1.6 * GB / share, 1000, utilization=share)
        assert part == whole, f"{whole} requests fit in all of a GPU, {part} in {words}"
    given = _fit(function, _shape(), 0, 1.8 * GB, 1000, utilization=0.9)
    usual = function(_shape(), parameters=0, gpu_bytes=1.8 * GB, context=1000)
    assert usual == given, f"{given} requests fit with a utilization of 0.9, {usual} when it is left at its default"


@requests_that_fit.property("a request fits entirely or not at all", hint="99.9 requests are 99, a whole number")
def _(function):
    exact, less = (_fit(function, _shape(), 0, 1.6 * GB - missing, 1000) for missing in (0, 1))
    assert less == exact - 1, f"{exact} requests fit exactly; with a byte less, {less}"
    beside = _fit(function, _shape(), 1.2 * GB / exact, 1.6 * GB, 1000)
    # Whether weights count at all is another property.
    assert beside in (exact - 2, exact), f"{exact} requests fit exactly; with weights as large as 1.5 of them, {beside}"
    one = _fit(function, _shape(), 0, 1.6 * GB / exact, 1000)
    assert one == 1, f"with room for exactly one request, {one}"
    none = _fit(function, _shape(), 0, 0.8 * GB / exact, 1000)
    assert none == 0, f"with room for half a request, {none}"
    assert_int(one, "with room for exactly one request")
