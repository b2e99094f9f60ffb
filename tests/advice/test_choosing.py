"""The recommended precision agrees with the record of measured speeds, and says why."""

import re
import subprocess
import sys
from dataclasses import replace
from statistics import median

import pytest

from minillm.advice import choosing, sizing
from minillm.advice.choosing import BF16, GPU, GPUS, LOSSES, METHODS, Traffic, recommend
from minillm.bench import records
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.kernels import few_rows
from minillm.model.config import PRESETS

GEMMA_2B, H200 = PRESETS["gemma-2b"], GPUS["H200"]
SPEED, QUALITY = records.read("h200/quantization"), records.read("cpu/quantization")
LENGTHS = re.compile(r"_(\d+)_(\d+)_x(\d+)$")  # of prompts and outputs, and requests, in a workload's name
LOADS = [name for name in dict.fromkeys(row["workload"] for row in SPEED["results"]) if LENGTHS.search(name)]
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


def speed(method: choosing.MethodFacts) -> tuple:
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
    best = key(found.best) if key(found.best) in rows else (*key(found.best)[:2], "auto")
    assert speeds[best] >= 0.94 * max(speeds.values()), speeds


@pytest.mark.parametrize("workload", LOADS)
def test_estimated_speeds_are_near_the_measured_ones(workload):
    rows = measured(workload)
    found = recommend(GEMMA_2B, H200, traffic(workload), loss="high", calibrated=True)
    candidates = {key(each): each for each in found.candidates}
    assert rows.keys() <= candidates.keys(), "a measured method is no candidate"
    for name, row in rows.items():
        assert candidates[name].speed == pytest.approx(row["times_bf16"], rel=0.11), (name, workload)
        assert candidates[name].output_tokens_per_s == pytest.approx(row["output_tokens_per_s"], rel=0.1)
        assert candidates[name].weight_bytes == pytest.approx(row["weight_bytes"], rel=0.002)


def test_the_shares_of_bandwidth_follow_from_the_record():
    """Each is the share with which the estimate would equal the measured time, the others being as they are."""
    found, written = {}, {}
    for method in METHODS:
        shares = {}
        for load in LOADS:
            row = measured(load).get((method.name, None, "auto"))
            if row and row["requests"] in (1, 4, 8, 16):
                shares[row["requests"]] = share(method, traffic(load), row["seconds"])
        found[method.name] = shares[1], median(shares[requests] for requests in (4, 8, 16))
        written[method.name] = method.alone, method.few
    for name, (alone, few) in found.items():
        assert written[name] == pytest.approx((alone, few), abs=0.05), f"{name}: alone={alone:.2f}, few={few:.2f}"


def share(method: choosing.MethodFacts, load: Traffic, seconds: float) -> float:
    low, high = 0.01, 4.0
    for _ in range(30):
        middle = (low + high) / 2
        changed = replace(method, alone=middle, few=middle)
        needed = choosing._seconds(GEMMA_2B, H200, load, changed, None, load.concurrency, 18_432).total
        low, high = (middle, high) if needed > seconds else (low, middle)
    return low


def test_the_rates_of_an_h200_are_those_of_the_records():
    roofline, ceiling = records.read("h200/roofline"), records.read("h200/ceiling-h200")
    assert H200.bytes_per_s == pytest.approx(roofline["bytes_per_s"], rel=0.01)
    most = max(row["rows"] for row in ceiling["matrix_products"])
    numbers = sum(choosing._numbers(GEMMA_2B))
    for dtype in ("bf16", "fp8"):
        (ms,) = (row["step_ms"] for row in ceiling["matrix_products"] if (row["rows"], row["dtype"]) == (most, dtype))
        reached = 2 * most * numbers / (ms / 1e3)
        if dtype == "bf16":
            assert H200.flops_per_s[dtype] == pytest.approx(reached, rel=0.01)
        else:  # the engine also rounds the inputs
            assert H200.flops_per_s[dtype] < reached


def test_losses_of_perplexity_are_those_of_the_record():
    rows = {row["quantization"]: row.get("perplexity_loss", 0.0) for row in QUALITY["results"]}
    for method in METHODS:
        assert method.perplexity_loss == rows.get(method.name, 0.0), method.name


def test_codes_are_converted_in_products_of_as_many_rows_as_the_kernel_takes():
    assert choosing.MOST_ROWS == few_rows.MOST_ROWS
    assert EngineConfig().on("cuda").max_num_batched_tokens == choosing.PROMPT


def test_few_requests_get_smaller_weights_and_many_get_8_bit_products():
    alone = recommend(GEMMA_2B, H200, Traffic(1, 128, 256))
    assert alone.best.method.bits == 8 and alone.quantized_head is not None
    assert alone.best.seconds.weights > alone.best.seconds.arithmetic
    many = recommend(GEMMA_2B, H200, Traffic(3000, 128, 128))
    assert many.best.method.products in ("int8", "fp8")
    assert many.best.seconds.arithmetic > many.best.seconds.weights


def test_a_gpu_without_fp8_is_not_given_any():
    found = recommend(GEMMA_2B, GPUS["A100"], Traffic(3000, 128, 128), loss="high")
    assert "fp8" not in {each.method.name for each in found.candidates} and found.quantization == "w8a8"


def test_of_methods_nearly_as_fast_the_one_that_loses_less_is_recommended(monkeypatch):
    better = replace(METHODS[1], name="better")
    worse = replace(better, name="worse", bits=7.9, perplexity_loss=0.1)
    monkeypatch.setattr(choosing, "METHODS", (BF16, better, worse))
    found = recommend(GEMMA_2B, H200, Traffic(1, 128, 256))
    assert [each.method.name for each in found.candidates][0] == "worse" and found.quantization == "better"
    assert found.kv_cache_dtype == "auto", "an 8-bit cache is hardly faster for one request, and may lose something"


def test_codes_are_dequantized_before_products_of_many_rows():
    (int8,) = (each for each in METHODS if each.name == "int8")
    dense, codes = (choosing.product(H200, each, 10**9, 100) for each in (BF16, int8))
    assert codes.weights - dense.weights == pytest.approx(3e9 / H200.bytes_per_s), "1 byte read, 2 written"
    assert codes.arithmetic == dense.arithmetic == 0


def test_calibrated_methods_are_only_recommended_if_asked_for(monkeypatch):
    monkeypatch.setattr(choosing, "METHODS", tuple(each for each in METHODS if each.products == "bf16"))
    load = Traffic(4, 128, 256)
    plain, calibrated = (recommend(GEMMA_2B, H200, load, calibrated=each) for each in (False, True))
    assert not any(each.method.calibrated for each in plain.candidates)
    assert calibrated.quantization == "gptq", "of two methods as fast, the one that loses less"
    assert calibrated.reasons[-2] == "It needs calibration: minillm quantize --method gptq."


def test_no_loss_is_bf16_with_its_own_cache():
    found = recommend(GEMMA_2B, H200, Traffic(3000, 128, 128), loss="none")
    assert (found.quantization, found.quantized_head, found.kv_cache_dtype) == (None, None, "auto")
    assert {each.kv_cache_dtype for each in found.candidates} == {"auto"}


def test_an_8_bit_cache_is_recommended_where_the_cache_limits_the_requests():
    assert recommend(GEMMA_2B, H200, Traffic(1, 128, 256)).kv_cache_dtype == "auto"
    limited = recommend(GEMMA_2B, GPUS["L4"], Traffic(1000, 2048, 512))
    assert limited.kv_cache_dtype == "fp8" and limited.best.requests < 1000
    assert any("memory limits this traffic" in each for each in limited.reasons)
    kept = recommend(GEMMA_2B, GPUS["L4"], Traffic(1000, 2048, 512), kv_cache_dtype="auto")
    assert limited.best.requests > 1.9 * kept.best.requests


def test_weights_and_requests_are_those_of_the_sizing_module():
    for candidate in recommend(GEMMA_2B, H200, Traffic(1, 100, 28), kv_cache_dtype="auto").candidates:
        if candidate.method is BF16:
            size = sizing.fit(GEMMA_2B, 141e9, 128)
            assert (candidate.weight_bytes, candidate.requests) == (size.weight_bytes, size.requests)


def test_an_untied_embedding_keeps_its_16_bits():
    untied = replace(GEMMA_2B, tie_word_embeddings=False)
    (int8,) = (each for each in METHODS if each.name == "int8")
    table = GEMMA_2B.vocab_size * GEMMA_2B.hidden_size
    assert choosing.weight_bytes(untied, int8, "int8") == choosing.weight_bytes(GEMMA_2B, int8, "int8") + 2 * table


def test_a_model_too_large_in_bf16_is_compared_by_memory():
    small = replace(H200, memory_bytes=4e9)
    found = recommend(GEMMA_2B, small, Traffic(8, 128, 128))
    assert found.quantization is not None and found.best.speed is None
    assert found.reasons[0] == "In bf16 the weights leave no room for a request on NVIDIA H200."
    assert " - " in str(found)


def test_it_prints_a_table_and_its_reasons():
    found = recommend(GEMMA_2B, H200, Traffic(1, 128, 256), kv_cache_dtype="auto")
    table, reasons = str(found).split("\n\n")
    head, *rows = table.splitlines()
    assert head.split() == ["speed", "weights", "requests", "that", "fit", "may", "lose"]
    assert sum(row.startswith("> ") for row in rows) == 1
    assert any(row.startswith(f"> {found.best.name} ") for row in rows)
    assert len({row[2:].split(",")[0].split()[0] for row in rows}) == len(rows), "one row a method"
    assert reasons.splitlines() == list(found.reasons)
    assert reasons.startswith("In bf16 on NVIDIA H200, one request spends ")
    assert f"{found.best.name} reads 2.51 GB of weights instead of 5.01 GB." in reasons
    assert f"memory does not limit this traffic.\nQuality: {found.quantization} changes" in reasons


def test_where_nothing_helps_it_says_so(monkeypatch):
    monkeypatch.setattr(choosing, "METHODS", METHODS[:2])
    found = recommend(GEMMA_2B, H200, Traffic(64, 128, 256), kv_cache_dtype="auto")
    assert [each.method.name for each in found.candidates] == ["bf16", "int8", "int8"]
    assert found.reasons[1].startswith("No quantized weights that loss='low' allows make this more than 3% faster")


def test_it_says_where_a_gpus_rates_come_from():
    sources = [recommend(GEMMA_2B, GPUS[name], Traffic(1, 9, 9)).reasons[-1] for name in ("H200", "L4")]
    assert sources[0].endswith("the GPU's rates are: measured.")
    assert sources[1].endswith("the GPU's rates are: datasheet, times the shares that an H200 reaches of its own.")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: recommend(GEMMA_2B, H200, Traffic(1, 1, 1), loss="some"),
            "loss must be one of none, low, medium, high",
        ),
        (lambda: recommend(GEMMA_2B, H200, Traffic(1, 1, 1), kv_cache_dtype="int3"), "dtype 'int3' is not one of"),
        (lambda: Traffic(0, 1, 1), "concurrency must be a whole number from 1, not 0"),
        (lambda: Traffic(1, 1.5, 1), "input_len must be a whole number from 1, not 1.5"),
        (lambda: GPU("mine", 1e9, 1e12, {"fp8": 1e12}), "flops_per_s must have bf16, and may have int8 and fp8"),
        (lambda: GPU("mine", 1e9, 0, {"bf16": 1e12}), "bytes_per_s of mine must be above 0, not 0"),
        (
            lambda: recommend(GEMMA_2B, replace(H200, memory_bytes=2e9), Traffic(1, 1, 1)),
            "needs 1.55 GB for its weights",
        ),
    ],
)
def test_invalid_input_is_rejected_with_a_remedy(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_it_runs_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from minillm.model.config import PRESETS;"
        "from minillm.advice.choosing import GPUS, Traffic, recommend;"
        "print(recommend(PRESETS['gemma-2b'], GPUS['H200'], Traffic(1, 128, 256)).quantized_head)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "int8\n"
