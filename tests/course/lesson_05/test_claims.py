"""What lesson 05's words say of records."""

import inspect

import pytest
import torch

from minillm.course.lesson_05.weight_formats import quantize_rows
from minillm.course.shared import gains, real_model
from minillm.kernels import few_rows, integer_rows
from minillm.quantization import Int8, Int8Weight
from tests.course.lesson import solved

lesson = solved("05")


def test_smollm2_loses_over_two_hundred_times_as_much_as_tiny_gemma_with_8_bits():
    lesson.says("the KL divergence is over two hundred times that of `tiny-gemma`")
    assert 200 < real_model.quality()["int8"]["kl"] / real_model.tiny_kl()["int8"] < 250
    assert 200 < lesson.number(r"^int8: (\d+) times the KL of tiny-gemma$") < 250


def test_kl_falls_by_a_third_with_zero_points():
    lesson.says("KL divergence falls by a third, and perplexity says the opposite")
    ratio, error = lesson.numbers(r"^KL, symmetric / zero points: ([\d.]+) ± ([\d.]+)$")
    assert 1 - 1 / ratio == pytest.approx(1 / 3, abs=0.02) and ratio - 1 > 2 * error


def test_a_records_bits_count_scales_and_zero_points_of_a_file():
    lesson.says("Bits are those of the layers in a file, where a zero point has 4 and a scale of int8 has 32.")
    assert lesson.number(r"^int4-g64 +([\d.]+) ") == 4 + 16 / 64
    assert real_model.quality()["int4-g32-zeros"]["bits_per_weight"] == 4 + 16 / 32 + 4 / 32


def test_the_squared_error_falls_by_more_than_the_square_of_the_step():
    lesson.says("the squared error falls by more than the square of the step")
    for size in (128, 64, 32, 16):
        step, error = lesson.numbers(rf"^ +{size} +([\d.]+) +([\d.]+)$")
        assert error > 1 / (step - 0.005) ** 2  # the step is printed with two digits


def test_the_spacing_grows_faster_with_few_bits():
    lesson.says("from 4 to 3 bits by 7/3, and from 3 to 2 bits by 3")
    scale = {bits: quantize_rows(torch.ones(1, 1).double(), bits)[1].item() for bits in (4, 3, 2)}
    assert scale[3] / scale[4] == pytest.approx(7 / 3) and scale[2] / scale[3] == pytest.approx(3)


def test_scales_of_int8_have_32_bits():
    lesson.says("The engine keeps the scales of int8 in 32 bits.")
    weight = Int8().empty(2, 2, False, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert isinstance(weight, Int8Weight) and weight.scales.dtype == torch.float32
    assert real_model.quality()["int8"]["bits_per_weight"] > 8 + 16 / 576  # SmolLM2's matrices have 576 inputs or more


def test_each_line_says_how_many_weights_share_a_scale():
    for size, bits in ((128, "4.12"), (64, "4.25"), (32, "4.50"), (16, "5.00")):
        lesson.number(rf"^{bits} bits: groups of {size} +([\d.]+) ")


def test_zero_points_help_smollm2():
    rows = real_model.quality()
    assert rows["int4-g32-zeros"]["kl_interval"][1] < rows["int4-g32"]["kl_interval"][0]


def test_the_times_of_a_step_and_of_its_products():
    """bfloat16 loses its fused step; other formats lose a faster kernel, too."""
    more, products = {}, {}
    for method in ("bf16", "int8, head int8", "int4 g128, head int8"):
        more[method] = gains.milliseconds(method, 4) - gains.milliseconds(method, 1)
        products[method] = gains.products(method, 4) - gains.products(method, 1)
    assert more.pop("bf16") == pytest.approx(0.4, abs=0.05) and products.pop("bf16") < 0.05
    assert gains.unfused() == pytest.approx(0.4, abs=0.05)
    assert all(ms > 0.6 for ms in more.values()) and all(abs(ms - 0.4) < 0.05 for ms in products.values())


def test_the_kernel_for_one_row_converts_the_inputs_and_the_other_one_the_codes():
    lesson.says(
        "As a rule, a weight is converted back before it is multiplied",
        "The kernel for 2 to 64 rows converts codes to bfloat16 in registers.",
        "each becomes an integer of two bytes, with one scale for 16 or 32 neighbors",
        "with two or more rows, this engine computes weight-only products in 16 bits",
        "Most uses of a weight now need a conversion",
    )
    assert few_rows.MOST_ROWS == 64
    assert "dp4a" in inspect.getsource(integer_rows) and "dp4a" not in inspect.getsource(few_rows)
    words_of_a_quad = 4  # which has one unit
    assert [words_of_a_quad * 32 // bits for bits in (8, 4)] == [16, integer_rows.GROUP]
