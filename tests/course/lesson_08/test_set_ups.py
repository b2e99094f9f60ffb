"""Lesson 08: a learner's functions in the engine give what the engine gives, and tables say what records do."""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch

from minillm import LLM, SamplingParams, using
from minillm.bench import records
from minillm.course.lesson_07 import eight_bits
from minillm.course.lesson_08 import choices, four_bits, pictures, small_caches
from minillm.course.shared import held_out
from minillm.kv_cache.layer_cache import quantize
from minillm.quantization import Mxfp4, Nvfp4
from minillm.quantization.methods.straight_through import fake_quantize


@pytest.fixture(scope="module")
def model():
    return small_caches.model_with()


@pytest.fixture(scope="module")
def text(model):
    return held_out.HeldOut(model, held_out.held_out_text(rows=2, length=64))


def attend(q, k_codes, k_scales, v_codes, v_scales, hidden, scale):
    k, v = k_codes.to(q.dtype) * k_scales[:, None], v_codes.to(q.dtype) * v_scales[:, None]
    return (q @ k.T * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_learners_cache_gives_what_the_engines_gives(kind, text):
    cached = small_caches.model_with(kind)
    wanted = text.predictions(cached)
    with using(**small_caches.operations(quantize, attend)) as used:
        found = text.predictions(cached)
    layers = len(cached.layers)
    assert used.calls["write_kv"] == used.calls["prefill_attention"] == layers
    # Sums in another order round a few numbers to the next code; which ones depends on the processor.
    assert (found.divergence - wanted.divergence).abs().mean() < 0.1 * wanted.divergence.mean()
    assert wanted.divergence.mean() > 1e-7
    params = SamplingParams(max_tokens=8, temperature=0)
    with LLM(device="cpu", kv_cache_dtype=kind, num_blocks=64) as llm:
        before = [each.token_ids for each in llm.generate(["Fenwick lies on", "Once upon a time there"], params)]
        with using(**small_caches.operations(quantize, attend)) as used:
            assert [
                each.token_ids for each in llm.generate(["Fenwick lies on", "Once upon a time there"], params)
            ] == before
    assert used.calls["decode_attention"] > 0


def test_an_unquantized_cache_needs_no_codes(text, model):
    def never(*given):
        raise AssertionError("called")

    with using(**small_caches.operations(never, never)):
        assert text.predictions(model).divergence.abs().max() < 1e-5


def test_rounding_keys_and_values_shares_scales_as_it_says(text, model):
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    for shared, count in (("tensor", 1), ("channel", 8), ("token and head", 10)):
        found = small_caches.rounded(x, 8, shared)
        scales = x.abs().amax(small_caches.SHARED[shared])
        assert scales.numel() == count if shared != "channel" else scales.shape == (2, 8)
        assert (found - x).abs().max() <= scales.max() / 127 / 2 + 1e-6
    none = small_caches.predictions_rounded(text, model, 2, None, None)
    keys = small_caches.predictions_rounded(text, model, 2, "token and head", None)
    values = small_caches.predictions_rounded(text, model, 2, None, "token and head")
    assert none.divergence.abs().max() < 1e-5 < values.divergence.mean() < keys.divergence.mean()


def test_more_requests_run_at_once_in_a_smaller_cache():
    one = small_caches.kv_at_once("int8", 1 << 19, requests=12)
    assert 1.5 * small_caches.kv_at_once("auto", 1 << 19, requests=12) < one < 12


def test_a_cache_as_large_as_the_weights():
    config = small_caches.model_with().config
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    weights = 2 * sum(tensor.numel() for tensor in small_caches.model_with().tensors())
    assert small_caches.requests_of_weights(config, 100) == pytest.approx(weights / (100 * per_token))


def test_speeds_of_small_caches_are_divided_by_those_of_the_same_weights(capsys):
    before, after = small_caches.committed()
    assert [row["workload"] for row in before] == [row["workload"] for row in after]
    for rows, kind in ((before, "bfloat16"), (after, "fp8")):
        assert all((row["quantization"], row["kv_cache_dtype"]) == ("fp8", kind) for row in rows)
    row = {"workload": "a", "requests": 4, "input_tokens": 400, "output_tokens": 80, "output_tokens_per_s": 100.0}
    small_caches.speeds([row], [row | {"output_tokens_per_s": 150.0}])
    assert capsys.readouterr().out.splitlines()[1].split() == ["4", "100", "20", "1.50"]


def test_fp4_by_a_function_gives_what_the_engines_formats_give(model, text):
    for name, format in (("NVFP4", Nvfp4()), ("MXFP4", Mxfp4())):
        mine = eight_bits.quantized(model, four_bits.formats(four_bits.quantize_fp4)[name])
        own = eight_bits.quantized(model, format)
        for layer, other in zip(mine.layers, own.layers, strict=True):
            one, two = layer.down.dequantize(), other.down.dequantize()
            assert ((one - two).abs() > 1e-6 * two.abs().max()).double().mean() < 0.01  # near ties


def test_a_student_starts_as_its_rounded_teacher_and_learns(model, text):
    student = four_bits.Student(model, lambda weight: fake_quantize(weight, 3, 128))
    before = [layer.down.dequantize().clone() for layer in model.layers]
    rows = four_bits.training_rows(steps=3, rows=1, length=64)
    first = student.loss(rows[0]).item()
    losses = four_bits.distill(student, [rows[0]] * 4, rate=2e-4)
    assert losses[0] == pytest.approx(first) and student.loss(rows[0]).item() < 0.9 * first
    assert all(torch.equal(layer.down.dequantize(), old) for layer, old in zip(model.layers, before, strict=True))


def test_the_table_says_what_the_records_do():
    found = choices.measured()
    assert found.keys() == choices.METHODS.keys()
    speed, quality = (records.read(name)["results"] for name in (choices.SPEED, choices.QUALITY))
    (row,) = [each for each in quality if each["quantization"] == "awq"]
    assert found["INT4 AWQ (W4A16)"].kl == pytest.approx(1000 * row["kl"])
    gains = {
        each["requests"]: each["times_bf16"]
        for each in speed
        if each["quantization"] == "fp8" and each["kv_cache_dtype"] == "bfloat16"
    }
    assert found["FP8 (W8A8)"].gains == gains and {1, 4, 16, 64, 3000} <= gains.keys()


def test_a_gain_in_words():
    assert [choices.word(gain) for gain in (0.7, 1.04, 1.05, 1.49, 1.5, 2.0)] == [
        "Low", "Low", "Medium", "Medium", "High", "High",
    ]  # fmt: skip
    found = {name: SimpleNamespace(gains={4: 1.2, 16: 1.6, 3000: 0.9}) for name in choices.METHODS}
    words = choices.judgments(found)
    assert words["FP8 (W8A8)", "few"] == ("Medium", "Medium", 4)
    assert words["INT4-FP8 AWQ (W4A8)", "many"] == ("Medium", "Low", 3000)
    assert choices.judgments(found, many=16)["INT4-FP8 AWQ (W4A8)", "many"] == ("Medium", "High", 16)


def test_sizes_are_those_of_weights_and_scales():
    """Not of files, whose metadata differs: methods with eight-bit weights are equally large."""
    found = choices.measured()
    eight = [found[name].bytes for name in ("FP8 (W8A8)", "INT8 SmoothQuant (W8A8)", "INT8 weight-only (W8A16)")]
    four = {found[name].bytes for name in choices.METHODS if name.startswith("INT4")}
    assert len(set(eight)) == len(four) == 1 and four.pop() < eight[0] < choices.dense_bytes()


def test_fronts_and_confirmed_words_are_what_the_lesson_says():
    found = choices.measured()
    fronts = {
        requests: choices.pareto_front({name: (x.kl, x.bytes, 1 / x.gains[requests]) for name, x in found.items()})
        for requests in (1, 3000)
    }
    assert fronts[1] == ["INT8 weight-only (W8A16)", "INT4 GPTQ (W4A16)"]
    assert fronts[3000] == ["FP8 (W8A8)", "INT8 SmoothQuant (W8A8)", *fronts[1]]
    four_bits = [found[f"INT4 {method} (W4A16)"].gains for method in ("weight-only", "AWQ", "GPTQ")]
    others = [method.gains[1] for name, method in found.items() if "W4A16" not in name]
    assert all(max(others) < gains[1] and 0.95 < gains[3000] < 1.05 for gains in four_bits)
    counts = [choices.confirmed(found, few, many) for few in (1, 4) for many in (16, 64, 3000)]
    assert counts == [8, 12, 12, 5, 9, 9]
    assert all(low <= 0 < high for low, high in (x.interval for x in found.values()))


def test_panels_of_choices_have_the_same_axes():
    points = {"a": (0.1, 4e6, 0.8), "b": (3.0, 2e6, 1.7)}
    pictures.pareto({"one": points, "many": points | {"a": (0.1, 4e6, 2.5)}}, {"one": ["b"], "many": ["a"]})
    one, many = plt.gcf().axes
    assert one.get_xlim() == many.get_xlim() and one.get_ylim() == many.get_ylim()
    assert one.get_ylim()[1] > 2.5 and one.get_xscale() == many.get_xscale() == "symlog"
    plt.close("all")


def test_speeds_in_the_table_are_those_with_a_16_bit_cache(monkeypatch):
    wanted = choices.measured()
    read = records.read

    def with_small_caches(name):
        found = read(name)
        if name != choices.SPEED:
            return found
        more = [{**row, "kv_cache_dtype": "fp8", "times_bf16": 9.0} for row in found["results"]]
        return {**found, "results": [*found["results"], *more]}

    monkeypatch.setattr(records, "read", with_small_caches)
    assert choices.measured() == wanted
