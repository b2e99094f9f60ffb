"""Every exercise's solution agrees with the engine's implementation, or with torch, on random inputs.

A checker covers only mistakes that its author thought of. These tests detect when exercise and engine drift apart.
"""

import random
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minillm import LLM, SamplingParams, Tokenizer
from minillm.advice import sizing
from minillm.bench import serve, workloads
from minillm.course.lesson_00 import step_time
from minillm.course.making import build, lesson
from minillm.course.shared import adapters, checks
from minillm.course.shared.interpret import kernel_device, surrounded
from minillm.kv_cache import BlockPool, LayerCache, OutOfBlocks
from minillm.kv_cache import block_pool as kv_cache
from minillm.model.config import PRESETS
from minillm.model.loader import EMBEDDED
from minillm.ops import AttentionOptions, Rows, reference
from minillm.request import Request
from minillm.scheduler import Scheduler
from minillm.scheduler.policies import FirstComeFirstServed, StaticBatching
from minillm.tokenizer import StreamingDetokenizer, bpe, training
from minillm.tokenizer.gemma import BYTE_TOKENS, SPECIAL_TOKENS
from tests.chance import SEED
from tests.course.references import REFERENCES, against

for each in ("05", "06", "07", "08", "11", "13", "14", "15"):
    import_module(f"tests.course.references_{each}")  # it registers its references

WITHOUT = {
    "find_fault": "its answers are words; the checker's own products are right and wrong ones",
    "next_step": "the engine gives single tokens first: share_budget",
    "accept_or_resample": "the engine accepts drafts by agreement",
    "PatientShortest": "a policy that the engine does not have",
}


def test_every_exercise_has_a_reference_or_a_reason_for_having_none():
    assert not REFERENCES.keys() & WITHOUT.keys()
    assert checks.every().keys() == REFERENCES.keys() | WITHOUT.keys()


@pytest.mark.explore
@pytest.mark.parametrize("name", REFERENCES)
def test_a_solution_agrees_with_its_reference(name, defined):
    module = checks.find(name).properties[0].holds.__module__
    (source,) = build.sources([module.rpartition(".lesson_")[2][:2]])  # of lesson_09.checks, lesson_09.checks_keys
    solution = defined(source, lesson.SOLUTION)[name]
    compare, cases = REFERENCES[name]
    for seed in range(cases):
        compare(solution, random.Random(SEED + seed))


def drawn(rng: random.Random, *shape: int, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.getrandbits(32)), dtype=torch.float64).to(
        dtype
    )


# ---- lesson 00


@against("continue_text", cases=1)
def _(solution, rng):
    with LLM(device="cpu", dtype="float64") as llm:

        def next_token(ids):
            found = llm.generate(ids, SamplingParams(max_tokens=1, temperature=0, logprobs=4))[0].logprobs[0]
            return dict(sorted(found.items()))

        def engines(prompt, *ends):
            params = SamplingParams(max_tokens=8, temperature=0, stop_token_ids=list(ends), ignore_eos=True)
            return llm.generate(prompt, params)[0].token_ids

        for text in ("Once upon a time", "Fenwick lies on the island of"):
            prompt = llm.tokenizer.encode(text)
            for end in (prompt[-1], *engines(prompt)[2:6:3]):
                assert solution(next_token, prompt, 8, end) == [token for token in engines(prompt, end) if token != end]


@against("step_work")
def _(solution, rng):
    given = [(rng.randint(1, 99), rng.randint(1, 99), rng.choice((0, 1, 400))) for _ in range(rng.randint(1, 5))]
    size = rng.choice((1, 2, 4, 8))
    assert tuple(solution(given, size)) == step_time.step_work(given, size)


@against("free_batch")
def _(solution, rng):
    given = rng.randint(1, 10**10), rng.choice((1, 2, 4)), rng.randint(1, 10**12), rng.randint(1, 10**14)
    assert solution(*given) == step_time.free_batch(*given)


def normed(rng) -> tuple[Tensor, Tensor, float]:
    rows, dim = rng.randint(1, 5), rng.randint(1, 70)
    dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16))
    x = drawn(rng, rows, dim) * 10 ** rng.uniform(-3, 2)
    return x.to(dtype), drawn(rng, dim, dtype=torch.float32), 10 ** rng.uniform(-7, -1)


@against("rms_norm")
def _(solution, rng):
    given = normed(rng)
    torch.testing.assert_close(solution(*given), reference.rms_norm(*given))


# ---- lesson 01


@against("bpe_merge", cases=200)
def _(solution, rng):
    made = list("abc")
    pairs = dict.fromkeys(
        pair for _ in range(rng.randint(0, 12)) if made.append("".join(pair := tuple(rng.choices(made, k=2)))) is None
    )
    order = rng.sample(list(pairs), len(pairs)) if rng.random() < 0.5 else pairs
    ranks = {pair: rank for rank, pair in enumerate(order)}
    symbols = rng.choices("abcd", (4, 4, 4, 1), k=rng.randint(0, 40))
    assert solution(list(symbols), ranks) == bpe.merge(list(symbols), ranks)


@against("learn_merges")
def _(solution, rng):
    counts = {"".join(rng.choices("abc", k=rng.randint(1, 7))): rng.randint(1, 9) for _ in range(rng.randint(0, 12))}
    words = [(list(word), count) for word, count in counts.items()]
    steps = rng.randint(0, 30)
    assert solution(counts, steps) == list(islice(training.most_frequent_pairs(words), steps))


@against("TextStream", cases=40)
def _(solution, rng):
    tokenizer = Tokenizer.from_pretrained(EMBEDDED)
    tokens = [
        rng.choice(rng.choice((BYTE_TOKENS, list(SPECIAL_TOKENS), [tokenizer.token(rng.randrange(4096))])))
        for _ in range(rng.randint(0, 12))
    ]
    tokens += rng.choice(([], [f"<0x{byte:02X}>" for byte in "é松🌊"[rng.randrange(3)].encode()]))
    mine, theirs = solution(SPECIAL_TOKENS), StreamingDetokenizer(tokenizer)
    pieces = [*(mine.push(token) for token in tokens), mine.finish()]
    assert pieces == [*(theirs.add([tokenizer.id(token)]) for token in tokens), theirs.flush()]


@against("render_chat")
def _(solution, rng):
    space = ["", " ", "\n", "\t \n"]
    messages = [
        {"role": role, "content": rng.choice(space) + rng.choice(("Hi", "a  b", "c\nd")) + rng.choice(space)}
        for role in ("user", "assistant", "user", "assistant")[: rng.randint(1, 4)]
    ]
    opened = rng.random() < 0.5
    template = Tokenizer.from_pretrained(EMBEDDED).apply_chat_template
    assert solution(messages, opened) == template(messages, add_generation_prompt=opened)


# ---- lesson 02


def heads_of(rng) -> tuple[int, int, int]:
    """heads, kv_heads, d."""
    kv_heads = rng.randint(1, 3)
    return kv_heads * rng.randint(1, 3), kv_heads, rng.choice((4, 8))


@against("attention")
def _(solution, rng):
    tokens, (heads, kv_heads, dim) = rng.randint(1, 9), heads_of(rng)
    q, k, v = (drawn(rng, tokens, many, dim) for many in (heads, kv_heads, kv_heads))
    scale = 10 ** rng.uniform(-1, 3)
    wanted = F.scaled_dot_product_attention(
        *(each.transpose(0, 1)[None] for each in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True
    )
    torch.testing.assert_close(solution(q, k, v, scale=scale), wanted[0].transpose(0, 1))


@against("append")
def _(solution, rng):
    capacity, tokens = rng.randint(1, 9), [rng.randint(1, 5) for _ in range(4)]
    caches = [SimpleNamespace(k=torch.zeros(capacity, 2, 4), v=torch.zeros(capacity, 2, 4), length=0) for _ in range(2)]
    for count in tokens:
        k, v = (drawn(rng, count, 2, 4, dtype=torch.float32) for _ in range(2))
        refused = []
        for put, cache in zip((solution, adapters.append), caches, strict=True):
            try:
                put(cache, k, v)
            except ValueError:
                refused.append(put)
        assert len(refused) in (0, 2)
        mine, theirs = caches
        assert mine.length == theirs.length and torch.equal(mine.k, theirs.k) and torch.equal(mine.v, theirs.v)


@against("cached_attention")
def _(solution, rng):
    length, (heads, kv_heads, dim) = rng.randint(1, 9), heads_of(rng)
    q = drawn(rng, rng.randint(1, length), heads, dim)
    k, v = (drawn(rng, length + rng.randint(0, 4), kv_heads, dim) for _ in range(2))
    scale = 10 ** rng.uniform(-1, 3)
    wanted = adapters.cached_attention(q, k, v, length, scale=scale)
    torch.testing.assert_close(solution(q, k, v, length, scale=scale), wanted)


@against("requests_that_fit")
def _(solution, rng):
    kv_heads = rng.choice((1, 2, 8))
    config = replace(PRESETS["gemma-2b"], num_layers=rng.randint(1, 40), num_heads=8, num_kv_heads=kv_heads)
    gpu_bytes, context, share = 10 ** rng.uniform(9, 12), 16 * rng.randint(1, 512), rng.uniform(0.1, 1)
    size, dtype = rng.choice(((2, "bfloat16"), (4, "float32")))
    wanted = sizing.fit(config, gpu_bytes, context, dtype=dtype, utilization=share).requests
    parameters = sizing.parameters(config)
    assert solution(config, parameters, gpu_bytes, context, bytes_each=size, utilization=share) == wanted


# ---- lessons 03 and 04


def placed(x: Tensor) -> Tensor:
    """A copy on the kernels' device, surrounded by memory that a faulty kernel may overwrite safely."""
    return surrounded(x.float().to(kernel_device()), 0.5)[0]


@against("geglu", cases=3)
def _(solution, rng):
    rows, size = rng.randint(1, 3), rng.randint(1, 1500)
    gate_up, out = placed(drawn(rng, rows, 2 * size)), placed(torch.zeros(rows, size))
    solution(gate_up, out)
    torch.testing.assert_close(out, reference.gated_activation(gate_up, "gelu"), rtol=1e-4, atol=1e-5)


@against("add_row_norm", cases=4)
def _(solution, rng):
    x, weight, eps = normed(rng)
    x, weight, residual = placed(x), placed(weight), placed(drawn(rng, *x.shape))
    out, total = placed(torch.zeros_like(x)), placed(torch.zeros_like(x))
    solution(x, residual, weight, eps, out, total)
    normed_sum, wanted = reference.add_rms_norm(x, residual, weight, eps)
    torch.testing.assert_close((out, total), (normed_sum, wanted), rtol=1e-4, atol=1e-5)


@against("transpose", cases=3)
def _(solution, rng):
    x = placed(drawn(rng, rng.randint(1, 90), rng.randint(1, 90)))
    out = placed(torch.zeros(x.T.shape))
    solution(x, out)
    assert torch.equal(out, x.T)


@against("tiled_linear", cases=3)
def _(solution, rng):
    columns = rng.randint(1, 150)
    x, weight = (placed(drawn(rng, rng.randint(1, 90), columns)) for _ in range(2))
    out = placed(torch.zeros(len(x), len(weight)))
    solution(x, weight, out)
    torch.testing.assert_close(out, x @ weight.T, rtol=1e-4, atol=1e-4)


def shares_of(rng) -> list[tuple[Tensor, Tensor]]:
    """Pieces of keys, each (scores [3, keys], values [keys, 4]); some pieces and sometimes whole rows are masked."""
    pieces = []
    for _ in range(rng.randint(1, 4)):
        keys = rng.randint(1, 5)
        scores = drawn(rng, 3, keys) * 10 ** rng.uniform(-1, 3)
        hidden = torch.tensor([[rng.random() < 0.4] for _ in range(3)])
        pieces.append((scores.masked_fill(hidden, -torch.inf), drawn(rng, keys, 4)))
    return pieces


def attended(pieces: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention with torch's softmax over all keys at once; zeros for rows that see none."""
    scores, values = torch.cat([s for s, _ in pieces], 1), torch.cat([v for _, v in pieces])
    return scores.softmax(-1).nan_to_num(0) @ values


@against("online_attention")
def _(solution, rng):
    pieces = shares_of(rng)
    torch.testing.assert_close(solution(iter(pieces), 3, 4).double(), attended(pieces))


@against("combine")
def _(solution, rng):
    pieces = shares_of(rng)
    partial = torch.stack([attended([piece]) for piece in pieces], 1)
    log_total = torch.stack([scores.logsumexp(-1) for scores, _ in pieces], 1)
    torch.testing.assert_close(solution(partial, log_total), attended(pieces))


@against("tiles_to_visit", cases=100)
def _(solution, rng):
    first, keys = rng.randint(0, 60), rng.randint(1, 16)
    last, window = first + rng.randint(0, 40), rng.choice((None, rng.randint(1, 50)))
    seen = reference.visible(torch.arange(first, last + 1)[None], last + 2 * keys, window).flatten(0, -2).any(0)
    assert list(solution(first, last, keys, window)) == sorted(
        {key // keys for key in seen.nonzero().flatten().tolist()}
    )


def paged(rng, rows: int, kv_heads: int, dim: int, block_size: int) -> tuple[LayerCache, Tensor, Tensor]:
    """A cache in float32, block_table [rows, 4] and lengths [rows]."""
    cache = LayerCache(*(drawn(rng, 4 * rows, block_size, kv_heads, dim, dtype=torch.float32) for _ in range(2)))
    table = torch.tensor(rng.sample(range(4 * rows), 4 * rows), dtype=torch.int32).view(rows, 4)
    return cache, table, torch.tensor([rng.randint(1, 4 * block_size) for _ in range(rows)], dtype=torch.int32)


@against("paged_decode", cases=2)
def _(solution, rng):
    kv_heads, group = rng.randint(1, 2), rng.randint(1, 4)
    cache, table, lengths = paged(rng, 2, kv_heads, 16, 16)
    q = drawn(rng, 2, 1, kv_heads * group, 16, dtype=torch.float32)
    wanted = reference.decode_attention(q, cache, Rows.decoding(table, lengths), AttentionOptions(0.25))
    device = kernel_device()
    cache = LayerCache(cache.k.to(device), cache.v.to(device))
    found = solution(
        *(each.to(device) if isinstance(each, Tensor) else each for each in (q, cache, table, lengths)), scale=0.25
    )
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5)


# ---- lesson 09


@against("slots_of")
def _(solution, rng):
    size = rng.randint(1, 16)
    table = rng.sample(range(99), rng.randint(1, 6))
    start, end = sorted(rng.randint(0, len(table) * size) for _ in range(2))
    assert list(solution(table, start, end, size)) == adapters.slots_of(table, start, end, size)


def assert_same_behavior(pools: tuple, rng, keys: int) -> None:
    """Random identical calls to two pools of eight blocks must reject, cache, find and evict the same."""
    held: list[tuple[list[int], list[int]]] = []
    known = [bytes([number]) for number in range(keys)]
    for _ in range(80):
        act = rng.choice(("allocate", "share", "release", "release", "register", "lookup"))
        if act == "allocate":
            given, count = [], rng.randint(1, 4)
            for pool in pools:
                with suppress(OutOfBlocks):
                    given.append(pool.allocate(count))
            assert len(given) in (0, 2)
            held += [tuple(given)] if given else []
        elif act == "lookup":
            asked = rng.sample(known, rng.randint(0, keys))
            found = tuple(list(pool.lookup(asked)) for pool in pools)
            assert len(found[0]) == len(found[1])
            for pool, blocks in zip(pools, found, strict=True):
                pool.share(blocks)
            held += [found] if found[0] else []
        elif held:
            chosen = rng.choice(held)
            key, place = rng.choice(known) if known else b"", rng.randrange(len(chosen[0]))
            for pool, blocks in zip(pools, chosen, strict=True):
                if act == "register":
                    pool.register(blocks[place], key) if known else None
                else:
                    getattr(pool, act)(blocks)
            held.remove(chosen) if act == "release" else held.append(chosen) if act == "share" else None
        mine, theirs = pools
        assert (mine.available, mine.cached) == (theirs.available, theirs.cached)


@against("MyBlockPool")
def _(solution, rng):
    assert_same_behavior((solution(8), BlockPool(8)), rng, keys=0)


@against("MyPrefixPool")
def _(solution, rng):
    assert_same_behavior((solution(8), BlockPool(8)), rng, keys=6)


@against("prefix_keys")
def _(solution, rng):
    size, salts = rng.randint(1, 4), ("", "tenant")
    beginning = rng.choices((1, 2, 11, 12, 21, 112), k=rng.randint(0, 12))
    found: tuple[list, list] = [], []
    for _ in range(6):
        tokens = beginning[: rng.randint(0, 12)] + rng.choices((1, 11, 111), k=rng.randint(0, 6))
        salt = rng.choice(salts)
        for keys, make in zip(found, (solution, kv_cache.prefix_keys), strict=True):
            keys += make(np.array(tokens, np.int32), size, salt)
    mine, theirs = ([[key == other for other in keys] for key in keys] for keys in found)
    assert mine == theirs


# ---- lesson 10


@against("steps_and_idle")
def _(solution, rng):
    # Not 1: a one-token request would finish while the engine still fills a static batch, and another would replace it.
    outputs, rows = [rng.randint(2, 12) for _ in range(rng.randint(1, 14))], rng.randint(1, 5)
    for in_flight in (True, False):
        sizes = {"max_num_seqs": rows, "max_num_batched_tokens": 64, "max_model_len": 32, "block_size": 4}
        scheduler = Scheduler(**sizes, num_blocks=64, policy=FirstComeFirstServed() if in_flight else StaticBatching())
        for number, tokens in enumerate(outputs):
            prompt = np.array([1, 2, 3, 4], np.int32)
            scheduler.submit(Request(str(number), prompt, SamplingParams(max_tokens=tokens), 4 + tokens))
        steps = cells = 0
        while scheduler.has_work:
            step = scheduler.schedule()
            scheduler.complete(step, np.ones(int(step.samples.sum()), np.int64))
            steps, cells = steps + 1, cells + len(step.rows)
        assert tuple(solution(outputs, rows, in_flight)) == (steps, steps * rows - cells)


@against("share_budget", cases=100)
def _(solution, rng):
    pending = np.array([rng.choice((1, rng.randint(1, 20))) for _ in range(rng.randint(1, 8))], np.int32)
    budget = rng.randint(1, 40)
    assert solution(pending, budget).tolist() == FirstComeFirstServed().share(pending, budget).tolist()


# ---- lesson 99


@against("timings")
def _(solution, rng):
    due, when, arrivals = rng.uniform(0, 9), 10.0, []
    for _ in range(rng.randint(1, 9)):
        when += rng.random()
        arrivals.append((when, rng.randint(1, 3)))
    seen = serve.RequestTimes(due=due, arrivals=arrivals, end=when)
    ttft, gaps, e2e = solution(due, arrivals)
    assert [ttft, *gaps, e2e] == pytest.approx([seen.ttft, *seen.gaps, seen.e2e])


@against("pooled_percentile", cases=50)
def _(solution, rng):
    gaps = [[rng.random() for _ in range(rng.randint(1, 30))] for _ in range(rng.randint(1, 5))]
    wanted = serve.percentiles([gap for each in gaps for gap in each])
    for p in serve.PERCENTILES:
        assert solution(gaps, p) == pytest.approx(wanted[f"p{p}"], abs=1e-6)


@against("poisson_arrivals")
def _(solution, rng):
    rate, seed, requests = 10 ** rng.uniform(-1, 3), rng.getrandbits(32), [workloads.BenchRequest([1], 1)] * 9
    draws = random.Random(seed)
    uniform = [draws.random() for _ in requests]
    wanted = [each.due for each in workloads.poisson(requests, rate, seed=seed)]
    assert list(solution(rate, uniform)) == pytest.approx(wanted)


@against("batched_attention")
def _(solution, rng):
    rows, (heads, kv_heads, dim) = rng.randint(1, 4), heads_of(rng)
    cache, table, lengths = paged(rng, rows, kv_heads, dim, 4)
    q = drawn(rng, rows, heads, dim, dtype=torch.float32)
    k, v = (part[table].flatten(1, 2) for part in (cache.k, cache.v))
    for row, length in enumerate(lengths.tolist()):
        k[row, length:], v[row, length:] = torch.nan, torch.nan
    scale = 10 ** rng.uniform(-1, 2)
    wanted = reference.decode_attention(q[:, None], cache, Rows.decoding(table, lengths), AttentionOptions(scale))
    torch.testing.assert_close(solution(q, k, v, lengths, scale), wanted[:, 0], rtol=1e-3, atol=1e-4)
