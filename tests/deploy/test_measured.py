"""What the docs say of replicas on Ray is what the record has."""

from pathlib import Path

from minillm.bench import records

DOCS = Path(__file__).parents[2] / "docs"
ROWS = records.read("cpu/replicas")["results"]
TEXT = " ".join((DOCS / "operating.md").read_text(encoding="utf-8").split())


def part(name: str) -> list[dict]:
    return [row for row in ROWS if row["part"] == name]


def in_ms(part_name: str, name: str) -> str:
    *first, last = (max(round(1000 * row[name]), 0) for row in part(part_name))
    return f"{', '.join(map(str, first))} and {last} ms"


def test_added_times_are_those_of_the_record():
    assert [row["clients"] for row in part("added")] == [1, 8, 32]
    assert f"sends the first token {in_ms('added', 'added_ttft_p50_s')} later" in TEXT
    assert f"takes {in_ms('added', 'ray_choose_s')} to reserve a place on an empty replica" in TEXT
    many = part("added")[-1]
    assert f"a token takes {many['added_cpu_us_per_token']:.0f} µs more of processor time" in TEXT
    assert f"and {many['throughput_ratio']:.0%} of the tokens are sent" in TEXT


def test_bursts_and_rays_own_proxy_are_those_of_the_record():
    assert [row["clients"] for row in part("bursts")] == [8, 32] and [row["clients"] for row in part("proxy")] == [
        1,
        8,
        32,
    ]
    assert f"{in_ms('bursts', 'added_ttft_p50_s')} later to 8 and 32 clients that all arrive at once" in TEXT
    assert f"first token {in_ms('proxy', 'added_ttft_p50_s')} later than the HTTP workers" in TEXT
    assert f"to 32 it sends {part('proxy')[-1]['throughput_ratio']:.0%} of the tokens" in TEXT


def test_what_was_asked_for_is_reached():
    limits = {1: 5e-3, 8: 8e-3, 32: 25e-3}
    assert all(row["added_ttft_p50_s"] <= limits[row["clients"]] for row in part("added"))
    assert part("added")[-1]["added_cpu_us_per_token"] <= 60
    assert min(row["throughput_ratio"] for row in part("throughput")) >= 0.85


def test_throughput_is_that_of_the_record():
    least = min(row["throughput_ratio"] for row in part("throughput"))
    assert f"kept at least {int(100 * least)}% of its throughput" in TEXT


def test_killed_replicas_lost_and_changed_nothing():
    assert len(part("killed")) >= 3
    assert all(row["moved"] > 0 and row["lost"] == row["wrong"] == 0 for row in part("killed"))
    assert "no request was lost and no token changed when a replica was killed" in TEXT
