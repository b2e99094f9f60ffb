"""Adapters run a learner's single-request attention in place of the engine's batched one."""

import pytest
import torch

import minillm
from minillm.course.shared import adapters
from minillm.kv_cache import LayerCache
from minillm.ops import AttentionOptions, Rows, reference
from tests.chance import SEED

pytestmark = pytest.mark.explore

BLOCK, KV_HEADS, HEADS, DIM = 4, 2, 4, 8
LENGTHS = [5, 8, 1]


@pytest.fixture
def paged():
    """Three requests in scattered blocks; unused slots hold large stale values."""
    generator = torch.Generator().manual_seed(SEED)
    cache = LayerCache(*(torch.randn(9, BLOCK, KV_HEADS, DIM, generator=generator, dtype=torch.float64) for _ in "kv"))
    cache.k[6:], cache.v[6:] = 1e3, 1e3
    table = torch.tensor([[3, 0], [5, 2], [4, 6]], dtype=torch.int32)
    return cache, table, torch.tensor(LENGTHS, dtype=torch.int32)


def queries(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, HEADS, DIM, generator=torch.Generator().manual_seed(SEED + 1), dtype=torch.float64)


@pytest.mark.parametrize("count", [1, 3])
def test_decode_of_several_requests_equals_the_engines(paged, count):
    cache, table, lengths = paged
    lengths = lengths.clamp(min=count)
    q = queries(len(table), count)
    given = (q, cache, Rows.decoding(table, lengths, count), AttentionOptions(0.3))
    got = adapters.gathered(adapters.cached_attention)["decode_attention"](*given)
    torch.testing.assert_close(got, reference.decode_attention(*given))


def test_a_row_without_keys_gives_zeros_without_calling_the_learners_function(paged):
    cache, table, _ = paged
    refuse = adapters.gathered(lambda *_, **__: pytest.fail("called"))
    q = queries(3, 1)
    rows = Rows.decoding(table, torch.zeros(3, dtype=torch.int32))
    got = refuse["decode_attention"](q, cache, rows, AttentionOptions(1.0))
    assert not got.any()


def test_chunks_of_prompts_equal_the_engines(paged):
    cache, table, lengths = paged
    q, starts = queries(9), torch.tensor([0, 2, 8, 9], dtype=torch.int32)
    given = (q, cache, Rows(table, lengths, starts, 6), AttentionOptions(0.3))
    got = adapters.gathered(adapters.cached_attention)["prefill_attention"](*given)
    torch.testing.assert_close(got, reference.prefill_attention(*given))


def test_whole_prompts_run_on_an_attention_without_a_cache(paged):
    cache, table, lengths = paged
    starts = torch.tensor([0, 5, 13, 14], dtype=torch.int32)
    given = (queries(14), cache, Rows(table, lengths, starts, 8), AttentionOptions(0.3))
    got = adapters.gathered_prompts(adapters.attention)["prefill_attention"](*given)
    torch.testing.assert_close(got, reference.prefill_attention(*given))


def test_an_attention_without_a_cache_rejects_a_chunk(paged):
    cache, table, lengths = paged
    starts = torch.tensor([0, 2, 8, 9], dtype=torch.int32)
    run = adapters.gathered_prompts(adapters.attention)["prefill_attention"]
    with pytest.raises(ValueError, match="2 queries over 5 keys.*enable_prefix_caching=False"):
        run(queries(9), cache, Rows(table, lengths, starts, 6), AttentionOptions(1.0))


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"soft_cap": 50.0}])
def test_window_and_soft_cap_are_passed_only_if_the_model_has_them(paged, options):
    cache, table, lengths = paged
    seen = []

    def watch(q, k, v, length, **given):
        seen.append(given)
        return q

    rows = Rows.decoding(table, lengths)
    adapters.gathered(watch)["decode_attention"](queries(3, 1), cache, rows, AttentionOptions(0.5, **options))
    assert seen == [{"scale": 0.5, **options}] * 3


@pytest.fixture(scope="module")
def llm():
    with minillm.LLM(dtype="float64", device="cpu", num_blocks=64) as llm:
        yield llm


PROMPTS = ["Fenwick lies on the island of", "Once upon a time"]


def tokens(llm) -> list[list[int]]:
    params = minillm.SamplingParams(max_tokens=8, temperature=0)
    return [completion.token_ids for completion in llm.generate(PROMPTS, params)]


def test_generation_runs_on_a_learners_attention(llm):
    want = tokens(llm)
    with minillm.using(**adapters.gathered(adapters.cached_attention)) as used:
        assert tokens(llm) == want
    assert min(used.calls.values()) > 0
    blind = adapters.gathered(lambda q, *_, **__: torch.zeros_like(q))
    with minillm.using(**blind):
        assert tokens(llm) != want


def test_with_a_stub_generation_uses_the_engines_attention(llm):
    def stub(q, k, v, length, *, scale):
        raise minillm.NotSolvedYet("cached_attention")

    want = tokens(llm)
    with minillm.using(**adapters.gathered(stub)) as used:
        assert tokens(llm) == want
    assert set(used.not_solved) == {"decode_attention", "prefill_attention"}


def test_a_full_contiguous_cache_rejects_new_tokens_and_keeps_its_content():
    class Cache:
        k, v, length = torch.zeros(3, 1, 2), torch.zeros(3, 1, 2), 0

    cache = Cache()
    adapters.append(cache, torch.ones(2, 1, 2), torch.full((2, 1, 2), 5.0))
    with pytest.raises(ValueError, match="2 tokens after 2 do not fit a cache of 3"):
        adapters.append(cache, torch.ones(2, 1, 2), torch.ones(2, 1, 2))
    assert cache.length == 2 and cache.k[:, 0, 0].tolist() == [1, 1, 0] and cache.v[:, 0, 0].tolist() == [5, 5, 0]
