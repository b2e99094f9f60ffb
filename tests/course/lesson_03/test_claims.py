"""What lesson 03 says about saved launches and bytes is what its cells print from the record."""

from tests.course.lesson import solved

lesson = solved("03")


def test_nine_launches_become_one():
    lesson.says("the savings come from running eight fewer kernels", "two of the nine launches move almost nothing")
    assert lesson.number(r"^(\d+) launches, 48.3 MB$") == 9
    assert lesson.printed.count(" 0.00 MB\n") == 2


def test_bytes_explain_more_of_the_savings_with_more_tokens():
    lesson.says(
        "For one token, the bytes explain nothing",
        "For 512 tokens, the bytes explain less than half of the savings. For 3,000, they can explain most.",
    )
    line = r"^ *{} tokens: .* saves ([\d.]+) µs; moving the saved bytes would take at most +([\d.]+) µs$"
    one, some, many = (lesson.numbers(line.format(tokens)) for tokens in ("1", "512", "3,000"))
    assert one[1] < 0.1 and some[1] < some[0] / 2 < many[0] / 2 < many[1]
