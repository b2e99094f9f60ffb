"""Attention over a sequence, a cache of keys and values, attention over the cache, and its size.  Lesson 02."""

from types import SimpleNamespace

import torch
from torch import Tensor

from . import Exercise

DIM = 8


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _same(got: Tensor, want: Tensor) -> bool:
    assert got.shape == want.shape, f"the shape is {list(got.shape)}, not {list(want.shape)}"
    return torch.allclose(got, want.to(got.dtype), rtol=0, atol=1e-6)


# ---- attention of a whole sequence

attention = Exercise("attention")


@attention.example
def _(function):
    q, k, v = _random(1, 2, DIM), _random(1, 1, DIM, seed=1), _random(1, 1, DIM, seed=2)
    alone = function(q, k, v, scale=1.0)
    assert _same(alone, v.expand(1, 2, DIM)), "a lone token does not get its own value: does it see itself?"
    # Four tokens; the last one's query fits the second one's key: it gets nearly that token's value.
    q, k, v = torch.zeros(3, 4, 1, DIM, dtype=torch.float64)
    q[3, 0, 0], k[1, 0, 0], v[:, 0, :4] = 30.0, 1.0, torch.eye(4)
    assert function(q, k, v, scale=1.0)[3, 0, 1] > 0.99, "a query does not find the key that fits it"


@attention.property("scores are multiplied by the scale", hint="q · k times `scale`, before the softmax")
def _(function):
    q, k, v = _random(5, 2, DIM), _random(5, 1, DIM, seed=1), _random(5, 1, DIM, seed=2)
    return _same(function(q, k, v, scale=0.25), function(q * 0.25, k, v, scale=1.0))


@attention.property(
    "no query sees a later key",
    hint="token i may look at tokens 0 to i: the mask hides keys with j > i, and sets their scores to -inf (not to "
    "-100: what is seen may score less)",
)
def _(function):
    v = _random(5, 1, DIM, seed=2)
    for q, k, later in _seen_and_later(5, 5):
        before = function(q, k, v, scale=0.5)
        for token in range(1, 5):
            k2, v2 = k.clone(), v.clone()
            k2[token:], v2[token:] = later, -7.0
            after = function(q, k2, v2, scale=0.5)
            assert _same(after[:token], before[:token]), f"token {token - 1} changed when a later key did"


@attention.property(
    "the weights of a query sum to 1", hint="the softmax runs over the keys: the last axis of the scores"
)
def _(function):
    v = torch.full((6, 1, DIM), 2.0, dtype=torch.float64)
    return _same(function(_random(6, 2, DIM), _random(6, 1, DIM, seed=1), v, scale=0.5), v.expand(6, 2, DIM))


@attention.property(
    "every KV head is read", hint="with 4 heads and 2 KV heads, heads 0 and 1 use KV head 0, heads 2 and 3 KV head 1"
)
def _(function):
    heads = _value_heads(function)
    assert set(heads) == {1, 2}, f"KV heads with values 1 and 2 gave heads with {heads}"


@attention.property(
    "heads that share a KV head are adjacent",
    hint="groups are blocks: 0 0 1 1, not 0 1 0 1 (repeat_interleave, not repeat; or unflatten the heads)",
)
def _(function):
    heads = _value_heads(function)
    assert heads[0] == heads[1] and heads[2] == heads[3], f"KV heads with values 1 and 2 gave heads with {heads}"


@attention.property(
    "large scores do not overflow",
    hint="exp(1000) is inf: subtract each row's maximum first, as torch.softmax does",
)
def _(function):
    q = torch.full((3, 1, DIM), 30.0, dtype=torch.float64)
    out = function(q, q, _random(3, 1, DIM), scale=1.0)
    assert out.isfinite().all(), "scores of 7,200 gave nan or inf"


def _seen_and_later(queries: int, keys: int) -> list[tuple[Tensor, Tensor, float]]:
    """Queries, keys, and what to put into keys that a query must not see: random; then scores of -300 next to 300."""
    low = torch.ones(queries, 2, DIM, dtype=torch.float64), torch.full((keys, 1, DIM), -75.0, dtype=torch.float64)
    return [(_random(queries, 2, DIM), _random(keys, 1, DIM, seed=1), 3.0), (*low, 75.0)]


def _value_heads(function) -> list[float]:
    """One token, KV head 0 with values 1, KV head 1 with values 2: which come out of each of four heads."""
    v = torch.tensor([1.0, 2.0], dtype=torch.float64)[None, :, None].expand(1, 2, DIM).contiguous()
    out = function(_random(1, 4, DIM), _random(1, 2, DIM, seed=1), v, scale=0.5)
    return [round(value, 6) for value in out[0, :, 0].tolist()]


# ---- a cache of keys and values

append = Exercise("append", returns=False)


def _cache(capacity: int, tokens: int = 0) -> SimpleNamespace:
    """A cache that has `tokens` tokens: their keys 1, 2, ..., their values 10, 20, ..."""
    cache = SimpleNamespace(k=torch.zeros(capacity, 1, 2), v=torch.zeros(capacity, 1, 2), length=tokens)
    for token in range(tokens):
        cache.k[token], cache.v[token] = token + 1, 10 * (token + 1)
    return cache


def _tokens(*numbers: float) -> Tensor:
    return torch.tensor(numbers)[:, None, None].expand(len(numbers), 1, 2).clone()


@append.example
def _(function):
    cache = _cache(4)
    function(cache, _tokens(7.0), _tokens(7.0))
    assert cache.k[:, 0, 0].tolist() == [7, 0, 0, 0], f"the key is not in slot 0: {cache.k[:, 0, 0].tolist()}"
    assert cache.length == 1, f"one token was appended, the length is {cache.length}"


@append.property("new tokens follow the old ones", hint="the first free slot is cache.length")
def _(function):
    cache = _cache(6, tokens=2)
    function(cache, _tokens(3.0), _tokens(3.0))
    got = cache.k[:, 0, 0].tolist()
    assert got == [1, 2, 3, 0, 0, 0], f"keys 1 2, then 3 appended, gives {got}"


@append.property("the length counts tokens", hint="several tokens may come at once: the length grows by len(k)")
def _(function):
    cache = _cache(6)
    function(cache, _tokens(1.0, 2.0, 3.0), _tokens(1.0, 2.0, 3.0))
    assert cache.length == 3, f"three tokens were appended at once, the length is {cache.length}"


@append.property("tokens that come together are all kept", hint="they fill the slots from cache.length on, one each")
def _(function):
    cache = _cache(6)
    function(cache, _tokens(1.0, 2.0, 3.0), _tokens(1.0, 2.0, 3.0))
    for name, got in (("keys", cache.k[:, 0, 0].tolist()), ("values", cache.v[:, 0, 0].tolist())):
        assert got == [1, 2, 3, 0, 0, 0], f"{name} 1 2 3, appended at once to an empty cache, give {got}"


@append.property(
    "values are kept as well as keys", hint="k goes into cache.k, v into cache.v, both into the same slots"
)
def _(function):
    cache = _cache(6, tokens=2)
    function(cache, _tokens(3.0), _tokens(30.0))
    keys, values = cache.k[:, 0, 0].tolist(), cache.v[:, 0, 0].tolist()
    assert values == [10 * key for key in keys], f"each value is ten times its key; keys {keys} have values {values}"


@append.property(
    "a cache can be filled to its last slot",
    hint="refuse when cache.length + len(k) is more than len(cache.k), not when it is as much",
)
def _(function):
    try:
        function(_cache(3, tokens=1), _tokens(2.0, 3.0), _tokens(20.0, 30.0))
    except ValueError:
        raise AssertionError("two tokens after one in a cache of three were refused") from None


@append.property(
    "a cache too small refuses, and keeps what it has",
    hint="look at cache.length + len(k) and len(cache.k) first, and raise ValueError before you write",
)
def _(function):
    cache = _cache(3, tokens=2)
    try:
        function(cache, _tokens(3.0, 4.0), _tokens(30.0, 40.0))
    except ValueError:
        return cache.length == 2 and cache.v[:, 0, 0].tolist() == [10 * key for key in cache.k[:, 0, 0]] == [10, 20, 0]
    raise AssertionError("two tokens after two in a cache of three raised no ValueError")


@append.property(
    "memory is written in place", hint="torch.cat copies all earlier tokens at every step: assign into a slice instead"
)
def _(function):
    cache = _cache(4, tokens=1)
    places = cache.k.data_ptr(), cache.v.data_ptr()
    function(cache, _tokens(2.0), _tokens(2.0))
    return (cache.k.data_ptr(), cache.v.data_ptr()) == places and len(cache.k) == 4


# ---- attention over a cache

cached_attention = Exercise("cached_attention")


def _filled(capacity: int) -> tuple[Tensor, Tensor]:
    return _random(capacity, 1, DIM, seed=1), _random(capacity, 1, DIM, seed=2)


@cached_attention.example
def _(function):
    q, k, v = _random(1, 2, DIM), _random(1, 1, DIM, seed=1), _random(1, 1, DIM, seed=2)
    alone = function(q, k, v, 1, scale=1.0)
    assert _same(alone, v.expand(1, 2, DIM)), "a lone token does not get its own value: does it see itself?"
    q, k, v = torch.zeros(3, 4, 1, DIM, dtype=torch.float64)
    q[3, 0, 0], k[1, 0, 0], v[:, 0, :4] = 30.0, 1.0, torch.eye(4)
    assert function(q, k, v, 4, scale=1.0)[3, 0, 1] > 0.99, "a query does not find the key that fits it"


@cached_attention.property(
    "every query sees its whole past",
    hint="query i of n is at position length - n + i, not at i, and sees every key up to and including that one",
)
def _(function):
    for queries in (1, 3):
        k, v = _filled(6)
        q = _random(queries, 2, DIM)
        before = function(q, k, v, 6, scale=0.5)
        for i in range(queries):
            for key in range(6 - queries + i + 1):
                v2 = v.clone()
                v2[key] += 50.0
                moved = (function(q, k, v2, 6, scale=0.5) - before)[i].abs().max()
                assert moved > 1e-6, f"query {i} of {queries}, at position {6 - queries + i}, does not see key {key}"


@cached_attention.property(
    "no query sees the keys after its own",
    hint="several new tokens at once are causal among themselves: query i of n sees keys up to length - n + i; the "
    "others score -inf (not -100: what is seen may score less)",
)
def _(function):
    v = _random(6, 1, DIM, seed=2)
    for q, k, later in _seen_and_later(3, 6):
        before = function(q, k, v, 6, scale=0.5)
        for key, query in ((4, 0), (5, 1)):
            k2, v2 = k.clone(), v.clone()
            k2[key:], v2[key:] = later, -7.0
            after = function(q, k2, v2, 6, scale=0.5)
            assert _same(after[query], before[query]), f"query {query} of 3, at position {3 + query}, sees key {key}"


@cached_attention.property(
    "leftovers beyond the length never matter, not even NaN",
    hint="cut k and v off at `length` first; a mask alone gives these values a weight of 0, and 0 * NaN is NaN",
)
def _(function):
    k, v = _filled(9)
    q = _random(1, 2, DIM)
    before = function(q, k, v, 5, scale=0.5)
    for left_k, left_v in ((3.0, 1e4), (torch.nan, torch.nan)):
        k[5:], v[5:] = left_k, left_v
        assert _same(function(q, k, v, 5, scale=0.5), before), (
            f"slots of {left_v:g} after the length changed the output"
        )


@cached_attention.property("scores are multiplied by the scale", hint="q · k times `scale`, before the softmax")
def _(function):
    k, v = _filled(5)
    q = _random(2, 2, DIM)
    return _same(function(q, k, v, 5, scale=0.25), function(q * 0.25, k, v, 5, scale=1.0))


@cached_attention.property(
    "groups of heads share a KV head",
    hint="with 4 heads and 2 KV heads, heads 0 and 1 use KV head 0, heads 2 and 3 KV head 1",
)
def _(function):
    heads = _value_heads(lambda q, k, v, *, scale: function(q, k, v, 1, scale=scale))
    assert heads == [1, 1, 2, 2], f"KV heads with values 1 and 2 gave heads with {heads}, not [1, 1, 2, 2]"


@cached_attention.property(
    "large scores do not overflow",
    hint="exp(1000) is inf: subtract each row's maximum first, as torch.softmax does",
)
def _(function):
    k = torch.full((5, 1, DIM), 30.0, dtype=torch.float64)
    out = function(k[:3], k, _random(5, 1, DIM), 5, scale=1.0)
    assert out.isfinite().all(), "scores of 7,200 gave nan or inf"


# ---- how many requests fit

requests_that_fit = Exercise("requests_that_fit")

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
    llama = _shape(layers=80, heads=8, kv_heads=8, head_dim=128)
    _expect(function(llama, parameters=70.6 * GB, gpu_bytes=80 * GB, context=1_000_000), 0, "a model too large")


@requests_that_fit.property("keys and values both count", hint="each layer keeps a key and a value: a factor of 2")
def _(function):
    one = _shape(layers=1, heads=1, kv_heads=1, head_dim=1)
    _expect(_fit(function, one, 0, 400, 1), 100, "a token, its key and its value one number each, 400 bytes")


@requests_that_fit.property(
    "every layer, every number of a head and every token counts",
    hint="multiply by num_layers, by head_dim and by context",
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
    hint="queries are used once and forgotten: multiply by num_kv_heads, not num_heads",
)
def _(function):
    few = _fit(function, _shape(heads=4, kv_heads=1), 0, 1.6 * GB, 1000)
    same = _fit(function, _shape(heads=1, kv_heads=1), 0, 1.6 * GB, 1000)
    assert few == same, f"with 4 query heads {few} requests fit, with 1 {same}; both have one KV head"
    all_heads = _fit(function, _shape(heads=4, kv_heads=4), 0, 1.6 * GB, 1000)
    assert all_heads * 4 == few, f"with 1 KV head {few} requests fit, with 4 {all_heads}"


@requests_that_fit.property(
    "the bytes of a number count", hint="bytes_each: 2 in bfloat16, 4 in float32; for the cache and for the weights"
)
def _(function):
    half = _fit(function, _shape(), 0.4 * GB, 3.2 * GB, 1000, bytes_each=2)
    full = _fit(function, _shape(), 0.4 * GB, 6.4 * GB, 1000, bytes_each=4)
    assert full == half, f"{half} requests fit with 2 bytes a number; with 4, on a GPU twice as large, {full}"


@requests_that_fit.property(
    "the weights come first", hint="parameters x bytes_each must be taken off before the cache is divided"
)
def _(function):
    empty, loaded = (_fit(function, _shape(), size, 3.2 * GB, 1000) for size in (0, 0.8 * GB))
    assert loaded * 2 == empty, f"{empty} requests fit without weights, {loaded} when weights take half of the GPU"


@requests_that_fit.property(
    "only the utilized share is used",
    hint="gpu_bytes x utilization is what weights and cache may take together: take the weights off after it",
)
def _(function):
    half = _fit(function, _shape(), 0.4 * GB, 3.2 * GB, 1000, utilization=0.5)
    whole = _fit(function, _shape(), 0.4 * GB, 1.6 * GB, 1000)
    assert half == whole, f"{whole} requests fit in all of a GPU, {half} in half of one twice as large"


@requests_that_fit.property(
    "a request fits completely or not at all", hint="99.9 requests are 99: round down, and give a whole number"
)
def _(function):
    exact, less = (_fit(function, _shape(), 0, 1.6 * GB - missing, 1000) for missing in (0, 1))
    assert less == exact - 1, f"{exact} requests fit exactly; with a byte less, {less}"
