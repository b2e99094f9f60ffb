"""What the docs say of replicas on Ray is what the record has."""

from pathlib import Path

from minillm.bench import records

DOCS = Path(__file__).parents[2] / "docs"
ROWS = records.read("cpu/replicas")["results"]
TEXT = " ".join((DOCS / "operating.md").read_text(encoding="utf-8").split())


def part(name: str) -> list[dict]:
    return [row for row in ROWS if row["part"] == name]


def in_ms(name: str) -> str:
    one, eight, many = (round(1000 * row[name]) for row in part("added"))
    return f"{one}, {eight} and {many} ms"


def test_added_times_are_those_of_the_record():
    assert [row["clients"] for row in part("added")] == [1, 8, 32]
    assert f"sends the first token {in_ms('added_ttft_p50_s')} later" in TEXT
    assert f"Ray's own part of this, takes {in_ms('ray_choose_s')}" in TEXT
    many = part("added")[-1]
    assert f"a token takes {many['added_cpu_us_per_token']:.0f} µs more of processor time" in TEXT
    assert f"and {many['throughput_ratio']:.0%} of the tokens are sent" in TEXT


def test_throughput_is_that_of_the_record():
    least = min(row["throughput_ratio"] for row in part("throughput"))
    assert f"keeps at least {int(100 * least)}% of its throughput" in TEXT


def test_killed_replicas_lost_and_changed_nothing():
    assert len(part("killed")) >= 3
    assert all(row["moved"] > 0 and row["lost"] == row["wrong"] == 0 for row in part("killed"))
    assert "no request was lost and no token changed when a replica was killed" in TEXT
