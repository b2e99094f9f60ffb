"""What lesson 04 says about an H200's attention is what its cells print from records."""

import pytest

from minillm.course.lesson_04 import attention_facts
from minillm.course.shared.launches import one_layer
from tests.course.lesson import solved

lesson = solved("04")


def test_causal_attention_needs_about_half_of_the_tiles():
    lesson.says("causal attention needs about half of the tiles; the longer the prompt, the closer to half")
    visited = [lesson.number(rf"^a prompt of +{size}: ([\d.]+)% of the tiles") for size in ("128", "512", "2,048")]
    assert visited == sorted(visited, reverse=True) and 50 < visited[-1] < 51


def test_prefill_is_faster_than_the_reference_and_slower_than_torch():
    lesson.says(
        "Our kernel was much faster than the reference, and a little slower than torch's",
        "in the record, prefill is still slower than torch's own",
    )
    ours, torchs, reference = (
        lesson.number(pattern)
        for pattern in (
            r"^prefill attention: .* measured ([\d.]+) ms",
            r"^torch's own attention: ([\d.]+) ms$",
            r"^the reference: ([\d.]+) ms$",
        )
    )
    assert torchs < ours < 1.2 * torchs and reference > 20 * ours


def test_shares_help_a_long_row_most_and_the_engines_rule_is_not_always_the_best():
    lesson.says(
        "A single long row gains the most.",
        "The engine's rule, marked by rings, is not always the best choice.",
        "With one short row or with 64 rows it falls at first, and the most shares are not the fastest.",
    )
    lines = attention_facts.h200_splits((1, 512), (1, 8192), (64, 512), (64, 8192))
    gain = {name: by[1]["ms"] / min(line["ms"] for line in by.values()) for name, by in lines.items()}
    assert max(gain, key=gain.get) == "1 row of 8,192 keys"
    best = {name: min(by, key=lambda shares: by[shares]["ms"]) for name, by in lines.items()}
    most = max(lines["1 row of 8,192 keys"])
    assert [name for name, shares in best.items() if shares == most] == ["1 row of 8,192 keys"]
    chosen = {name: next(shares for shares, line in by.items() if line["chosen"]) for name, by in lines.items()}
    assert chosen != best


def test_many_rows_come_close_to_the_memorys_speed_and_one_does_not():
    lesson.says(
        "With many rows it comes close.",
        "reading them would take a tenth of a microsecond, less than any kernel in the record takes",
        "Measured decode of 512 rows is just under the slope, of one row far below.",
    )
    line = r"^ *{}: .* floor +([\d.]+) us, +(\d+)% of the memory's speed$"
    floor, one = lesson.numbers(line.format("1 row of 384 keys"))
    _, many = lesson.numbers(line.format("512 rows of 200 to 2000 keys"))
    assert floor == 0.1 < lesson.number(r"^the shortest kernel in the record takes ([\d.]+) us$")
    assert one < 5 and many > 80


def test_what_torchs_attention_and_no_graphs_cost():
    lesson.says(
        "Torch's attention costs about a fifth of the speed with 256 requests and a quarter with one",
        "There each layer was eleven short kernels",
        "Graphs matter more than the attention, most of all for one request.",
    )
    many, one = lesson.numbers(r"^torch's attention, 256 .* measured ([\d.]+) of the tokens/s\n +with one.*, ([\d.]+) ")
    assert many == pytest.approx(0.8, abs=0.01) and one == pytest.approx(0.75, abs=0.015)
    without = lesson.numbers(r"^no CUDA graphs, 256 .* measured ([\d.]+) of the tokens/s\n +with one.*, ([\d.]+) ")
    assert without[1] < without[0] < min(many, one)
    assert len(one_layer(attention_facts.GEMMA, 1, 256, fused=True)) == 11
