"""What lesson 14 says is what its cells print, what its record has, and what its rules do."""

import itertools

import pytest
import torch

from minillm.advice import sizing
from minillm.bench import records
from minillm.course.lesson_14 import dividing, measured
from minillm.course.lesson_14.ranks import together
from minillm.kernels.peers import Reducer
from minillm.model import parallel
from minillm.model.config import PRESETS
from minillm.model.loader import EMBEDDED, read_config
from minillm.parallel import collectives
from minillm.parallel.ranks import PATIENCE
from tests.course.lesson import solved

lesson = solved("14")
GEMMA = PRESETS["gemma-2b"]


def test_one_sum_remains_and_it_is_needed():
    assert "the sum of both is y: True" in lesson.printed and "rank 0's part alone is y: False" in lesson.printed
    assert "two processes give the text of one: True" in lesson.printed
    assert "the text of one process: True" in lesson.printed
    for name in ("shard", "all_reduce", "sharded_argmax"):
        assert f"{name}: yours" in lesson.printed


def test_a_step_has_thirteen_sums():
    lesson.says("The embedded model has 6 layers.", "Two in each layer and one for the embeddings")
    assert lesson.number(r"^all-reduces: predicted 13 in a step, counted (\d+) in a step$") == 13
    assert dividing.reduces(read_config(EMBEDDED)) == 13


def test_the_cache_shrinks_up_to_eight_gpus_and_gemmas_never():
    lesson.says(
        "The cache of the large model shrinks up to 8 GPUs, and no further. That of Gemma 2B does not shrink at all",
        "which has 8 KV heads; Gemma 2B has one",
        "Gemma 2B has only 8 query heads, so 16 ranks cannot share it.",
    )
    for count in (1, 2, 4, 8, 16):
        expected = 327_680 // min(count, 8)
        assert lesson.numbers(rf"^ +{count} +([\d,]+) +(?:18,432|-)$") == (expected,)
        if count <= 8:
            assert sizing.kv_bytes_per_token(GEMMA.shard(count)) == 18_432
    assert (dividing.LARGE.num_kv_heads, GEMMA.num_kv_heads, GEMMA.num_heads) == (8, 1, 8)


def test_a_second_gpu_frees_only_the_memory_of_gemmas_weights():
    lesson.says("so they hold hardly more tokens than one")
    one, two = (sizing.fit(GEMMA.shard(count), 80e9, context=4096) for count in (1, 2))
    assert one.requests < two.requests < 1.05 * one.requests


def test_ranks_with_logits_of_their_own_agree_on_a_token():
    lesson.says("The token is chosen from numbers that all ranks are told (section 4), so they still agree on one")
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    first, *others = together(parallel.sharded_argmax, list(logits.chunk(4, -1))).results
    assert all(torch.equal(token, first[1]) for _, token in others)


def test_the_large_model_has_70_billion_parameters():
    lesson.says("the shape of Llama 3.1 70B")
    assert sizing.parameters(dividing.LARGE) == pytest.approx(70.55e9, rel=0.001)


def test_the_order_of_a_sum_matters():
    assert "(a + b) + c = 1.0\n(b + c) + a = 0.0" in lesson.printed
    assert lesson.number(r"^different sums: predicted .*, measured (\d+) of 1,000$") == 438


def test_without_a_sum_the_text_is_nonsense():
    assert "without a sum:  boy boy boy" in lesson.printed and "with a sum:     girl called Pia" in lesson.printed


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_is_sent_to_all_and_in_a_ring(ranks):
    everyone, ring, rounds, more = lesson.numbers(rf"^ +{ranks} +([\d,]+) bytes +([\d,]+) +(\d+) +(\d+)$")
    assert (rounds, more) == (1, 2 * (ranks - 1))
    x = [torch.ones(1, GEMMA.hidden_size)] * ranks
    assert 2 * together(parallel.all_reduce, x).ranks[0].sent == everyone == 4096 * (ranks - 1)
    assert ring == 4096 * 2 * (ranks - 1) / ranks


def test_when_a_second_gpu_pays():
    lesson.says("The model has 18 layers, so $R$ is 37.", "The step takes 1.34 ms.")
    lesson.says("At 1 microsecond, 2, 4 and 8 GPUs are 1.9, 3.6 and 6.6 times as fast as one.")
    lesson.says("They cross the line at 18, 27 and 32.")
    one, count = dividing.step_ms()[1], dividing.reduces(GEMMA)
    assert count == 37 and round(one, 2) == 1.34
    assert lesson.number(r"^one exchange: predicted .*, computed ([\d.]+) microseconds$") == 18.2
    assert [round(dividing.gain(one, count, 1, ranks), 1) for ranks in (2, 4, 8)] == [1.9, 3.6, 6.6]
    for ranks, limit in ((2, 18), (4, 27), (8, 32)):
        found = dividing.break_even_us(one, count, ranks)
        assert round(found) == limit and dividing.gain(one, count, found, ranks) == pytest.approx(1)


def test_what_sums_cost_and_a_second_gpu_saves():
    lesson.says(
        "A sum of one row takes 1.7 microseconds, a tenth of what it may, and by NCCL 6.3.",
        "More tokens take longer steps, but longer sums too. By the formula, two GPUs gain everywhere.",
    )
    record = {row["rows"]: row for row in records.read("h200/reduce")["results"] if row["hidden"] == GEMMA.hidden_size}
    steps, limit = dividing.step_ms(), dividing.break_even_us(dividing.step_ms()[1], 37, ranks=2)
    adds = {
        rows: (row["fused_us"] - row["norm_us"], row["nccl_us"] - row["norm_us"])
        for rows, row in record.items()
        if rows in steps
    }
    assert tuple(round(each, 1) for each in adds[1]) == (1.7, 6.3)
    assert 0.09 < adds[1][0] / limit < 0.11
    assert list(steps) == sorted(adds) and sorted(steps.values()) == list(steps.values())
    for place in (0, 1):
        costs = [each[place] for _, each in sorted(adds.items())]
        assert costs == sorted(costs)
    for rows, each in adds.items():
        one = 1e3 * steps[rows]
        *us, own, nccl = lesson.numbers(rf"^ +{rows}" + 6 * r" +([\d.,]+)" + "$")
        assert us == [round(number) for number in (one, one / 2, 37 * each[0], 37 * each[1])]
        assert (own, nccl) == tuple(round(one / (one / 2 + 37 * add), 2) for add in each) and nccl > 1.4


def test_what_two_gpus_gain():
    lesson.says("Two GPUs share Gemma 2B, and 256 requests of mixed lengths arrive at once.")
    assert lesson.number(r"^two GPUs, 256 requests: predicted .*, measured ([\d.]+) times one GPU$") == 1.13
    lesson.says("The table shows it for Llama 3.1 8B, whose 8 KV heads are divided, too.")
    gains = {}
    for model, requests in itertools.product(measured.WAYS, (1, 256)):
        results = records.read(measured.WAYS[model])["results"]
        one, shared, replicas = (row["output_tokens_per_s"] for row in results if row["requests"] == requests)
        shown = lesson.numbers(rf"^{model} +{requests} +([\d,]+) +([\d,]+) \(([\d.]+)\) +([\d,]+) \(([\d.]+)\)$")
        assert shown == (
            *(round(one), round(shared), round(shared / one, 2)),
            *(round(replicas), round(replicas / one, 2)),
        )
        gains[model, requests] = shared / one
    assert all(gains["Llama 3.1 8B", requests] > gains["Gemma 2B", requests] + 0.3 for requests in (1, 256))
    large = PRESETS["llama-3.1-8b"]
    assert large.num_kv_heads == 8 and large.shard(2).num_kv_heads == 4


def test_replicas_win_throughput_and_sharing_wins_the_latency_of_a_request():
    lesson.says(
        "do twice the work with no exchange at all, if there are enough requests: in the table each has all the "
        "requests of its row, so both together have twice as many, and a single request is no faster than on one GPU.",
        "replicas win throughput, and tensor parallelism the latency of a request.",
    )
    for way in measured.ways():
        assert 1.95 < way.replicas / way.one < 2.05 and 1 < way.shared / way.one < 2
    (first, *_) = measured.ways()
    assert first.requests == 1 and first.shared / first.one > 1.3


def test_how_gpus_that_are_connected_add():
    """The word's layout is that of tests/kernels/test_peers.py, in which other ranks' words come from the test."""
    lesson.says(
        "Two numbers of 16 bits travel in a word of 8 bytes, next to a counter, the *epoch*",
        "on two GPUs, of more than 1,024 rows",
    )
    rows = collectives.ROWS // 2
    inbox = torch.empty(2, 2, rows, collectives.WORDS, dtype=torch.int64, device="meta")
    reducer = Reducer(0, inbox, torch.empty(2), torch.empty(rows))
    takes = [reducer.takes(torch.empty(count, GEMMA.hidden_size, dtype=torch.bfloat16)) for count in (1024, 1025)]
    assert takes == [True, False]


def test_a_larger_model_has_more_to_divide_for_the_same_exchanges():
    lesson.says(
        "each GPU also reads all keys and values of Gemma's KV head",
        "at about 850 tokens a request these are 4 GB a step",
        "one layer of the 70B shape has far more bytes than one of Gemma 2B, and needs the same two all-reduces",
    )
    large, small = (
        (sizing.parameters(each) - 2 * each.vocab_size * each.hidden_size) / each.num_layers
        for each in (dividing.LARGE, GEMMA)
    )
    assert large > 7 * small and GEMMA.shard(2).num_kv_heads == 1
    row = next(row for row in records.read(measured.WAYS["Gemma 2B"])["results"] if row["requests"] == 256)
    tokens = row["input_tokens"] + row["output_tokens"] / 2  # of all requests, in the middle of their answers
    assert tokens / 256 == pytest.approx(850, rel=0.01)
    assert tokens * sizing.kv_bytes_per_token(GEMMA) == pytest.approx(4e9, rel=0.02)


def test_stages_are_idle_with_fewer_batches():
    lesson.says("it is $1 - m/p$ of the time", "then $(p - 1)/(m + p - 1)$ of the time is idle")
    for batches, share in ((1, 75), (2, 50), (4, 0), (8, 0)):
        assert lesson.number(rf"^batches: {batches}; the stages are idle (\d+)% of the time$") == share
    for stages, batches in ((4, 1), (4, 3), (6, 2)):
        begin = dividing.timeline([1.0] * stages, batches, 2000)
        assert dividing.idle(begin, [1.0] * stages) == pytest.approx(1 - batches / stages, abs=0.001)
        once = dividing.timeline([1.0] * stages, batches, 1)
        assert dividing.idle(once, [1.0] * stages) == pytest.approx((stages - 1) / (batches + stages - 1))


def test_a_pipeline_runs_a_long_prompt_sooner_and_a_decode_step_no_sooner():
    lesson.says(
        "For a faster step, GPUs must share each layer.",
        "A pipeline makes no decode step faster",
        "(A long prompt in pieces does get through sooner, since its pieces are in several stages at once.)",
    )
    for stages, pieces in ((2, 4), (4, 8)):
        one_gpu = stages * pieces  # ms, if a stage takes 1 ms for a piece
        prompt = dividing.timeline([1.0] * stages, pieces, 1)
        assert prompt[-1][-1][-1] + 1 == one_gpu * (pieces + stages - 1) / (pieces * stages) < one_gpu
        first, second = dividing.timeline([1.0] * stages, 1, 2)
        assert second[0][0] - first[0][0] == stages  # a token's layers take as long as on one GPU


def test_what_a_deployment_divides_and_leaves_out():
    lesson.says(
        "`sizing.fit` (lesson 02) divides 90% of the GPU's memory between its weights and its KV cache",
        "here nothing is subtracted for the workspace of a step and CUDA graphs",
    )
    found = sizing.fit(dividing.LARGE.shard(4), 80e9, context=4096)
    assert found.usable_bytes == 0.9 * 80e9
    assert found.cache_bytes == found.usable_bytes - found.weight_bytes


def test_how_long_ranks_of_the_engine_wait_for_each_other():
    lesson.says("in the engine, ranks that wait for each other are stopped only after a minute")
    assert PATIENCE == 60


def test_a_loop_of_exchanges_waits_for_each():
    lesson.says("A loop over `exchange` waits for each of them in turn; a kernel sends all of its own first.")
    ran = together(parallel.all_reduce, [torch.zeros(1)] * 4)
    assert ran.ranks[0].rounds == 3


def test_the_deployments():
    lesson.says(
        "Two GPUs hold the weights, and next to no requests, so two replicas of them hold few as well: 4 GPUs that "
        "share one copy hold 109. With 4, half of the usable memory is left for the cache, with 8 three quarters.",
        "The more is left, the less a second copy costs.",
        "over as few as hold your requests and give the latency",
        "they store everything once, and hold the most requests",
    )
    free = [
        fit.cache_bytes / fit.usable_bytes
        for fit in (sizing.fit(dividing.LARGE.shard(count), 80e9, context=4096) for count in (4, 8))
    ]
    assert free == pytest.approx([0.5, 0.75], abs=0.02)
    labels = {
        (count, kind): f"{count}: {kind}"
        for count, kind in (
            (2, "tensor parallel"),
            (4, "2 replicas of 2"),
            (4, "tensor parallel"),
            (8, "2 replicas of 4"),
            (8, "tensor parallel"),
            (16, "2 replicas of 8"),
            (16, "tensor parallel, 2 machines"),
            (16, "2 stages of 8, 2 machines"),
        )
    }
    rows = {key: lesson.number(rf"^{label} +[\d.]+ +([\d,]+)$") for key, label in labels.items()}
    assert lesson.number(r"^1 +[\d.]+ +([\d,]+)$") == 0
    assert rows[2, "tensor parallel"] == 2 and rows[4, "tensor parallel"] == 109
    for one, both in ((2, 4), (4, 8), (8, 16)):
        assert rows[both, f"2 replicas of {one}"] == 2 * rows[one, "tensor parallel"]
    most = rows[16, "2 stages of 8, 2 machines"]
    assert rows[16, "tensor parallel, 2 machines"] < rows[16, "2 replicas of 8"] < most
    costs = [
        rows[4, "tensor parallel"] / rows[4, "2 replicas of 2"],
        rows[8, "tensor parallel"] / rows[8, "2 replicas of 4"],
        most / rows[16, "2 replicas of 8"],
    ]
    assert costs == sorted(costs, reverse=True) and costs[0] > 10 * costs[1]
