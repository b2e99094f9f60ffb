"""What lesson 05's words say of records."""

import pytest

from minillm.course.shared import gains, real_model


def test_smollm2_loses_over_two_hundred_times_as_much_as_tiny_gemma_with_8_bits():
    assert 200 < real_model.quality()["int8"]["kl"] / real_model.tiny_kl()["int8"] < 250


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
