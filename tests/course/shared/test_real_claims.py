"""What the lessons and docs/measurements.md say about SmolLM2's record, and what else it shows clearly."""

import pytest

from minillm.bench import records
from minillm.course.shared import gains, real_model
from tools import quantized_real_model


@pytest.fixture(scope="module")
def kl():
    return {name: row["kl"] for name, row in real_model.quality().items()}


def clearly_less(*names: str) -> bool:
    """Whether the intervals of these methods follow one another without touching."""
    ends = [end for name in names for end in real_model.quality()[name]["kl_interval"]]
    return ends == sorted(ends)


def test_the_record_has_every_method_and_cache_on_48_windows():
    rows = real_model.quality()
    caches = (*quantized_real_model.CACHES, *quantized_real_model.SMALL_CACHES)
    assert list(rows) == ["stored", "bfloat16", *quantized_real_model.METHODS, *caches]
    assert {row["requests"] for row in rows.values()} == {quantized_real_model.WINDOWS} == {48}
    assert {"bfloat16", "int8", "int4", "w8a8", "fp8"} <= real_model.gains().keys()


def test_what_eight_and_four_bits_lose(kl):
    tiny = real_model.tiny_kl()
    assert clearly_less("int8", "int8+int8", "int4-g32-zeros") and kl["int8+int8"] < 0.01
    assert kl["int8"] / tiny["int8"] > 100 < kl["int4"] / tiny["int4"]
    assert kl["int4-g32-zeros"] < kl["int4-g32"] < kl["int4"]


def test_awq_is_ahead_of_gptq_and_both_of_rounding(kl):
    assert clearly_less("awq", "gptq", "int4") and clearly_less("awq-g32", "gptq-g32", "int4-g32")
    gained = kl["int4"] - kl["int4-g32"]
    assert gained < min(kl["int4"] - kl["awq"], kl["int4"] - kl["gptq"]) / 4
    removed = {name: 1 - kl[name] / kl["int4"] for name in ("awq", "gptq", "gptq-actorder")}
    assert removed == pytest.approx({"awq": 2 / 3, "gptq": 1 / 2, "gptq-actorder": 0.65}, abs=0.04)
    closed = (kl["gptq"] - kl["gptq-actorder"]) / (kl["gptq"] - kl["awq"])
    assert clearly_less("gptq-actorder", "gptq") and 0.7 < closed < 0.9
    assert len({real_model.quality()[name]["bytes"] for name in ("int4", "gptq", "gptq-actorder")}) == 1


def test_only_checkpoints_whose_groups_are_in_act_order_are_slow():
    """Gemma 2B on an H200, and SmolLM2 as this engine quantizes it."""
    rows = {row["quantization"]: row for row in records.read(gains.RECORD)["results"] if row["requests"] == 1}
    plain, ordered = rows["int4 g128, head int8"], rows["int4 g128 groups in act-order, head int8"]
    assert ordered["times_bf16"] < 1 < plain["times_bf16"]
    own = real_model.gains()
    assert own["gptq-actorder"] == pytest.approx(own["int4"], rel=0.1)


def test_who_survives_outliers(kl):
    for name in ("smoothquant", "w8a8-rotate"):
        assert clearly_less(name, "w8a8") and kl[name] < kl["w8a8"] / 2
    assert clearly_less("fp8-static", "w8a8-static") and kl["fp8-static"] / kl["fp8"] == pytest.approx(1.25, abs=0.05)
    assert kl["w8a8-static"] / kl["w8a8"] == pytest.approx(28, abs=0.5) and kl["smoothquant-static"] > 0.1
    assert kl["w8a8"] / kl["int8"] == pytest.approx(9, abs=0.5)
    undone = [(kl["w8a8"] - kl[name]) / (kl["w8a8"] - kl["int8"]) for name in ("smoothquant", "w8a8-rotate")]
    assert min(undone) > 0.8
    assert kl["w8a8-rotate"] / kl["fp8"] == pytest.approx(0.2, abs=0.02)
    assert kl["w8a8-static"] == max(kl[name] for name in kl if name.startswith(("w8a8", "smooth", "fp8", "int8")))
    assert kl["w4a8"] == pytest.approx(kl["awq"], rel=0.06)


def test_how_small_a_cache_may_be(kl):
    assert clearly_less("cache-int8", "cache-fp8", "cache-4-channel", "cache-4", "cache-2")
    assert (
        kl["cache-4-channel"] / kl["cache-4"] == pytest.approx(1 / 3, abs=0.05)
        and min(kl["cache-2"], kl["cache-2-channel"]) > 1
    )


def test_how_fp4_compares_with_int4_of_its_size(kl):
    assert clearly_less("nvfp4", "int4-g32") and clearly_less("int4", "mxfp4")
