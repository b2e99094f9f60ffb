"""A workload's lower bound counts the work of its steps, and kernel times are grouped by name."""

import json
from dataclasses import replace

import numpy as np
import pytest

from minillm import LLM
from minillm.bench import breakdown, profiling, roofline, workloads
from minillm.bench.breakdown import PARTS
from minillm.bench.roofline import PeakRates
from minillm.scheduler import Step

BYTES_ALONE, OPERATIONS_ALONE = PeakRates(1.0, float("inf")), PeakRates(float("inf"), 1.0)


@pytest.fixture(scope="module")
def llm():
    with LLM(enable_prefix_caching=False, device="cpu") as llm:
        yield llm


def step(starts: list[int], queries: list[int], samples: list[bool]) -> Step:
    starts, queries = np.array(starts, np.int32), np.array(queries, np.int32)
    return Step(
        0, np.arange(len(starts), dtype=np.int32), starts, queries, np.array(samples), int((queries == 1).sum())
    )


def test_matrix_work_of_a_decode_step_equals_the_single_step_count(llm):
    decode = step([20, 30, 40], [1, 1, 1], [True] * 3)
    wanted = roofline.step_work(llm, 3, 3)
    for limits, total in zip((BYTES_ALONE, OPERATIONS_ALONE), wanted, strict=True):
        floor = breakdown.step_floor(llm, decode, limits)
        assert floor["matrix products"] + floor["head and sampling"] == total


def test_reading_and_computing_overlap_within_a_part_and_parts_run_in_sequence(llm):
    decode = step([20], [1], [True])
    reading = breakdown.step_floor(llm, decode, BYTES_ALONE)
    computing = breakdown.step_floor(llm, decode, OPERATIONS_ALONE)
    both = breakdown.step_floor(llm, decode, PeakRates(1.0, 1.0))
    assert both == {part: max(reading[part], computing[part]) for part in PARTS}


def test_a_chunk_without_sampling_needs_no_head_and_only_part_of_the_last_layer(llm):
    chunk = breakdown.step_floor(llm, step([0], [64], [False]), OPERATIONS_ALONE)
    whole = breakdown.step_floor(llm, step([0], [64], [True]), OPERATIONS_ALONE)
    assert chunk["head and sampling"] == 0 < whole["head and sampling"]
    assert breakdown.step_floor(llm, step([0], [64], [False]), BYTES_ALONE)["head and sampling"] == 0
    last, shape = llm.engine.model.layers[-1], llm.model_config
    behind = sum(weight.weight.numel() for weight in (last.attention_out, last.gate_up, last.down))
    behind += shape.num_heads * shape.head_dim * shape.hidden_size
    assert whole["matrix products"] - chunk["matrix products"] == 2 * behind


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_attention_work_counts_each_visible_key(llm, window, monkeypatch):
    spans = [(0, 7), (9, 1), (3, 4)]
    for layer in llm.engine.model.layers:
        monkeypatch.setattr(layer, "attention", replace(layer.attention, window=window))
    shape = llm.model_config
    pairs = touched = 0
    for start, queries in spans:
        seen = [range(max(0, at + 1 - (window or at + 1)), at + 1) for at in range(start, start + queries)]
        pairs += sum(map(len, seen))
        touched += len(set().union(*seen))
    starts, queries = zip(*spans, strict=True)
    nbytes, operations = breakdown.attention_work(llm, step(list(starts), list(queries), [True] * 3))
    assert operations == 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    assert nbytes == touched * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * 4


def test_every_step_of_a_run_is_recorded_in_order_and_the_engine_is_unchanged(llm):
    work, executor = workloads.make("mixed", 320, scale=32, requests=5), llm.engine.executor
    with profiling.recording(llm.engine) as found:
        breakdown.generate(llm, work)
    totals = workloads.totals(work)
    assert sum(int(each.samples.sum()) for each in found.steps) == totals["output_tokens"]
    computed = (
        totals["input_tokens"] + totals["output_tokens"] - len(work)
    )  # the last token is sampled but not computed
    assert sum(int(each.queries.sum()) for each in found.steps) == computed
    assert len(found.done) == len(found.steps) and found.done == sorted(found.done)
    assert found.seconds(0, 3) + found.seconds(3, len(found.done)) == pytest.approx(found.done[-1] - found.began)
    assert llm.engine.executor is executor


def test_profiled_slices_are_spread_over_time_and_never_overlap():
    long_then_short = [float(i) for i in range(1, 101)] + [100 + i / 100 for i in range(1, 101)]
    starts = profiling.slices(long_then_short, 0.0)
    assert starts == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]
    assert all(later - early >= profiling.STEPS for early, later in zip(starts, starts[1:], strict=False))
    assert profiling.slices([1.0, 2.0], 0.0) == [0], "a run of two steps is one slice"


def test_kernels_are_grouped_and_the_matmul_before_sampling_is_the_head():
    kernels = [
        ("nvjet_sm90_tst_256x128", 0.0, 4.0),
        ("void cublasLt::splitKreduce_kernel<32>", 4.0, 5.0),
        ("decode_kernel", 5.0, 7.0),
        ("add_rms_norm_kernel", 7.0, 8.0),
        ("whole_rows_kernel", 8.0, 10.0),
        ("nvjet_sm90_tst_64x8_splitK", 10.0, 13.0),
        ("void cublasLt::splitKreduce_kernel<32>", 13.0, 14.0),
        ("chunk_mass_kernel", 14.0, 15.0),
        ("choose_kernel", 15.0, 15.5),
        ("Memcpy DtoH (Device -> Pinned)", 15.5, 16.0),
    ]
    wanted = {"matrix products": 7.0, "attention": 2.0, "head and sampling": 5.5, "other kernels": 1.5}
    assert profiling.seconds_by_group(kernels) == wanted


def test_time_with_two_overlapping_kernels_counts_once():
    kernels = [("long_rows_kernel", 0.0, 4.0), ("row_attention_kernel", 1.0, 6.0), ("advance_kernel", 2.0, 3.0)]
    found = profiling.seconds_by_group(kernels)
    assert (found["matrix products"], found["attention"], found["other kernels"]) == (4.0, 2.0, 0.0)


def test_the_record_holds_bound_rate_and_ratio_of_each_workload(model_directory, tmp_path, capsys):
    path = tmp_path / "roofline-workloads.json"
    options = {"scale": 32, "requests": 3, "repeat": 3, "load_format": "dummy", "device": "cpu"}
    content = breakdown.run(model_directory, workload=["single", "mixed"], **options, json_path=path)
    printed = capsys.readouterr().out.splitlines()
    assert content == json.loads(path.read_text()) == json.loads(printed[-1])
    assert [row["workload"] for row in content["results"]] == ["single_128_256_x1", "mixed_100-1024_x1024"]
    for row in content["results"]:
        assert len(row["runs"]) == 3 and row["seconds"] == sorted(row["runs"])[1]
        assert set(row["floor_seconds"]) == set(PARTS) and row["shares"] is None
        ratio = row["output_tokens_per_s"] / row["floor_tokens_per_s"]
        assert row["of_floor"] == pytest.approx(ratio, rel=0.05, abs=1e-4)
        assert 0 < row["cpu_ms_per_step"] <= row["seconds"] / row["steps"] * 1e3 * 1.05
    assert content["bytes_per_s"] > 0 and any("mixed_100" in line for line in printed[:-1])


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 12])
def test_on_a_gpu_all_of_the_time_is_accounted_for(requests):
    options = {"workload": ["mixed"], "scale": 8, "requests": requests, "device": "cuda", "quiet": True}
    row = breakdown.run(**options)["results"][0]
    assert set(row["shares"]) == {*profiling.GROUPS, "GPU idle"}
    assert all(share > 0 for share in row["shares"].values())
    assert sum(row["shares"].values()) == pytest.approx(1, abs=0.01)
