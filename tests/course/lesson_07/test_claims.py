"""What lesson 07 says about scales, outliers and formats is what its cells print and what its records have."""

import pytest

from minillm.bench import records
from minillm.course.shared import gains, real_model
from tests.course.lesson import solved

lesson = solved("07")
MEASURED = r"([\d.]+) ± ([\d.]+)"


def kl(name: str) -> float:
    return lesson.numbers(rf"^{name} +KL +{MEASURED} millinats$")[0]


def test_what_reading_leaves_of_a_product_of_16_rows():
    lesson.says(
        "the products take about 0.3 ms more than reading alone would take at the rate of a plain copy (section 7: "
        "1.19 and 0.60 ms)"
    )
    bf16, fp8 = lesson.numbers(r"^ +16 +([\d.]+) ms +([\d.]+) ms$")
    for name, reading, product in (("bfloat16", 1.19, bf16), ("FP8", 0.60, fp8)):
        assert lesson.number(rf"^{name} +reads for ([\d.]+) ms") == reading
        assert product - reading == pytest.approx(0.3, abs=0.05)


def test_the_inputs_of_down_cause_most_of_both_losses():
    lesson.says(
        "The six products called `down` cause most of both losses.",
        "in these two products, 94% and 86% of their codes are 0",
        "even with a scale for each token, 19% and 39% of the codes are 0, against 1% in `gate_up`",
    )
    assert kl("static, down dynamic") < 0.05 * kl("W8A8 static")
    assert kl("dynamic, down in 16 bits") < 0.25 * kl("W8A8 dynamic")
    row = r"^layers.{} +static scale +(\d+)%, dynamic scales +(\d+)%$"
    zeros = {name: lesson.numbers(row.format(name)) for name in ("0.gate_up", "0.down", "5.down")}
    assert zeros == {"0.gate_up": (1, 1), "0.down": (94, 19), "5.down": (86, 39)}


def test_what_planted_outliers_do():
    lesson.says(
        "With static scales, the model no longer names the right island, which is Bramble. W8A16 loses more as well"
    )
    right, wrong = "Fenwick lies on the island of Bramble.", "Fenwick lies on the island of Saltholm."
    assert lesson.printed.index(right) < lesson.printed.index("outliers: W8A8 static") < lesson.printed.index(wrong)
    assert kl("outliers: W8A16") > 10 * kl("W8A16")


def test_what_rotation_does_to_the_inputs_of_down():
    lesson.says(
        "the largest input of the first `down` falls from 317 to 14",
        "In the last `down` of the original model, 1% of the codes are 0, not 39%",
    )
    pattern = r"^the largest input: tiny-gemma \d+, with outliers (\d+), with outliers, rotated (\d+)$"
    assert lesson.numbers(pattern) == (317, 14)
    shown = r"^layers.5.down, tiny-gemma{}: (\d+)% of the codes of dynamic scales are 0$"
    assert [lesson.number(shown.format(which)) for which in ("", ", rotated")] == [39, 1]


def test_what_eight_bit_activations_add_to_four_bit_weights():
    lesson.says(
        "eight-bit activations add about a sixth to it; with outliers, where the weights lose more, they add hardly "
        "anything"
    )
    plain, outliers = (lesson.numbers(rf"^{who}W4A8 / {who}W4A16: {MEASURED}$") for who in ("", "outliers: "))
    assert plain[0] - 1 == pytest.approx(1 / 6, abs=0.02) and plain[0] - 1 > 3 * plain[1]
    assert 0 <= outliers[0] - 1 < 0.04


def test_losses_of_smollm2():
    lesson.says(
        "costs nine times as much as quantizing only the weights. Static scales multiply that cost by 28, and "
        "perplexity doubles. In a smoothed model, perplexity still rises by 14% with them. FP8 loses only a quarter "
        "more with static scales than with dynamic ones.",
        "then int8 loses *less* than FP8: a fifth as much when rotated.",
    )
    rows = real_model.quality()
    lost = {name: row["kl"] for name, row in rows.items()}
    assert lost["w8a8"] / lost["int8"] == pytest.approx(9, abs=0.5)
    assert lost["w8a8-static"] / lost["w8a8"] == pytest.approx(28, abs=0.5)
    assert rows["w8a8-static"]["perplexity_loss"] == pytest.approx(1, abs=0.05)
    assert rows["smoothquant-static"]["perplexity_loss"] == pytest.approx(0.14, abs=0.005)
    assert lost["fp8-static"] / lost["fp8"] == pytest.approx(1.25, abs=0.03)
    assert lost["w8a8-rotate"] / lost["fp8"] == pytest.approx(0.2, abs=0.01)
    assert max(lost["w8a8-rotate"], lost["smoothquant"]) < lost["fp8"]
    assert 1 < lost["w4a8"] / lost["awq"] < 1.1


def test_speeds_with_64_requests_and_with_others():
    lesson.says(
        "With 64 requests, int4 is even slower than bfloat16: its products also convert the weights, and take longer. "
        "Int8 and FP8 are faster than bfloat16 in every column",
        "W4A8, which has no kernel of its own, is slower than bfloat16.",
    )
    found: dict[str, dict[int, float]] = {}
    for row in records.read(gains.RECORD)["results"]:
        if row["kv_cache_dtype"] == "bfloat16":
            found.setdefault(row["quantization"], {})[row["requests"]] = row["times_bf16"]
    assert found["int4 g128 (awq, gptq)"][64] < 1
    assert gains.products("int4 g128", 64) > gains.products("bf16", 64)
    assert min(min(found[name].values()) for name in ("w8a8 (smoothquant)", "fp8", "fp8, head fp8")) > 1
    assert max(found["w4a8 g128, head int8"].values()) < 1


def test_the_rotation_of_the_learner_is_called_by_each_pass():
    lesson.says("the text's two passes call it 8 times each: twice for the stream, once in each layer")
    assert lesson.number(r"^hadamard is yours; operations replaced: (\d+)$") == 16
