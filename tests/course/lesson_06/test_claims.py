"""What lesson 06 says is what its cells print and what its records have."""

import re

from minillm.bench import records
from minillm.course.shared import gains
from tests.course.lesson import solved

lesson = solved("06")
ROW = re.compile(r"^(?:int4|awq|gptq)-g(\d+)\S* +(\d\.\d\d) ", re.MULTILINE)


def test_the_table_of_smollm2_names_the_groups_that_were_measured():
    """A scale of 16 bits for each group."""
    lesson.says("The names give the group size, which was 128 until now")
    rows = ROW.findall(lesson.printed)
    assert [int(size) for size, _ in rows] == [64] * 4 + [32] * 3
    assert all(float(bits) == 4 + 16 / int(size) for size, bits in rows)
    assert re.findall(r"^(?:int4|awq|gptq) +4\.", lesson.printed, re.MULTILINE) == []


def test_one_row_of_text_is_probably_too_little_for_gptq():
    lesson.says("about two standard errors below 0: calibrated on one row, GPTQ is probably *worse")
    share, error = lesson.numbers(r"^GPTQ, 1 row .* removed (-?\d+)% ± (\d+)$")
    assert -2.5 < share / error < -1.5


def test_groups_in_act_order_are_slow_with_one_request_and_with_many():
    lesson.says("and it is slower than bfloat16, as it is with 64 requests or more")
    name = "int4 g128 groups in act-order, head int8"
    rows = [each for each in records.read(gains.RECORD)["results"] if each["quantization"] == name]
    slower = {each["requests"] for each in rows if each["times_bf16"] < 1 and each["kv_cache_dtype"] == "bfloat16"}
    assert slower == {1, 64, 3000}


def test_a_target_counts_if_all_its_functions_are_the_learners():
    lesson.says("One that is reached counts if its functions, the search or GPTQ or both, are yours.")
    assert len(re.findall(r"target 0\.00\d\d: reached, yours$", lesson.printed, re.MULTILINE)) == 3


def test_on_ten_rows_awq_and_gptq_can_hardly_be_told_apart():
    lesson.says("GPTQ alone can hardly be told apart from AWQ with both searches")
    share, error = lesson.numbers(r"^GPTQ: removed (-?\d+)% ± (\d+) of the KL of 'AWQ: both'$")
    assert abs(share) < 2 * error


def test_on_tiny_gemma_gptq_is_ahead_with_every_set_of_calibration_texts():
    lesson.says(
        "On `tiny-gemma`, GPTQ is ahead: this record has almost 40 times as much text as section 5",
        "with groups of 64, GPTQ on each of five sets of calibration texts beats AWQ on any of them",
    )
    rows = {each["quantization"]: each for each in records.read("cpu/quantization-seeds")["results"]}
    gptq, awq = (rows[name]["kl_of_seeds"] for name in ("gptq-g64", "awq-g64"))
    assert len(gptq) == len(awq) == 5 and max(gptq) < min(awq)
    assert 35 < rows["gptq-g64"]["input_tokens"] / (10 * 256) < 40
