"""The recommended precision agrees with the record of measured speeds, and says why."""

import re

import pytest

from minillm.bench import records
from minillm.model import choosing
from minillm.model.choosing import GPUS, LOSSES, METHODS, Traffic, recommend
from minillm.model.config import PRESETS

GEMMA_2B, H200 = PRESETS["gemma-2b"], GPUS["H200"]
SPEED, QUALITY = records.read("h200/quantization"), records.read("cpu/quantization")
LENGTHS = re.compile(r"_(\d+)_(\d+)_x(\d+)$")  # of prompts and outputs, and requests, in a workload's name
LOADS = list(dict.fromkeys(row["workload"] for row in SPEED["results"]))
# Methods whose products have no kernel of their own yet, so that they are slower than those that have one.
WITHOUT_KERNEL = ("act-order", "w4a8")


def traffic(workload: str) -> Traffic:
    inputs, outputs, requests = map(int, LENGTHS.search(workload).groups())
    return Traffic(requests, inputs, outputs)


def measured(workload: str) -> dict[tuple[str, str | None, str], dict]:
    """The record's rows of a workload by method, head and cache, named as `recommend` names them."""
    found = {}
    for row in SPEED["results"]:
        weights, _, head = row["quantization"].partition(", head ")
        if row["workload"] != workload or any(name in weights for name in WITHOUT_KERNEL):
            continue
        first = next(each for each in METHODS if each.name == weights.split()[0])
        cache = "auto" if row["kv_cache_dtype"] == "bfloat16" else row["kv_cache_dtype"]
        for each in METHODS:
            if speed(each) == speed(first):  # they differ only in how their codes are chosen
                found.setdefault((each.name, head or None, cache), row)
    return found


def speed(method: choosing.Method) -> tuple:
    return method.bits, method.products, method.alone, method.few


def key(candidate: choosing.Candidate) -> tuple[str, str | None, str]:
    return candidate.method.name, candidate.quantized_head, candidate.kv_cache_dtype


@pytest.mark.parametrize("workload", LOADS)
@pytest.mark.parametrize("calibrated", [False, True], ids=["uncalibrated", "calibrated"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_recommended_method_is_nearly_the_fastest_measured(workload, loss, calibrated):
    rows = measured(workload)
    caches = {cache for *_, cache in rows}
    only = None if len(caches) > 1 else caches.pop()  # without measurements of an 8-bit cache
    found = recommend(GEMMA_2B, H200, traffic(workload), loss=loss, calibrated=calibrated, kv_cache_dtype=only)
    allowed = LOSSES[: LOSSES.index(loss) + 1]
    speeds = {key(each): rows[key(each)]["times_bf16"] for each in found.candidates if each.method.loss in allowed
              and key(each) in rows}  # fmt: skip
    assert speeds[key(found.best)] >= 0.95 * max(speeds.values()), speeds


@pytest.mark.parametrize("workload", LOADS)
def test_estimated_speeds_are_near_the_measured_ones(workload):
    rows = measured(workload)
    found = recommend(GEMMA_2B, H200, traffic(workload), loss="high", calibrated=True)
    candidates = {key(each): each for each in found.candidates}
    assert rows.keys() <= candidates.keys(), "a measured method is no candidate"
    for name, row in rows.items():
        assert candidates[name].speed == pytest.approx(row["times_bf16"], rel=0.1), (name, workload)
        assert candidates[name].output_tokens_per_s == pytest.approx(row["output_tokens_per_s"], rel=0.15)
        assert candidates[name].weight_bytes == pytest.approx(row["weight_bytes"], rel=0.002)
