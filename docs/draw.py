"""The README's picture and figures, from committed records alone.

python docs/draw.py           draws docs/at_work.svg and fills in the README's figures
python docs/draw.py record    measures this machine first: data/results/cpu/{offline,timeline}.json
"""

import re
import sys
from pathlib import Path

from minillm.bench import records

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "at_work.svg"
OFFLINE, TIMELINE = "cpu/offline", "cpu/timeline"
BLOCK = re.compile(r"(<!-- figures: .*? -->\n).*?(<!-- end of figures -->)", re.DOTALL)
COMMAND = "python docs/draw.py record"
ROWS = 12  # requests in one step of the timeline: few enough that some must wait


def measure() -> None:
    """Both records. The lone request is measured at full length, the mixed ones at an eighth."""
    from minillm import LLM, SamplingParams
    from minillm.bench import offline, workloads

    settings = {"repeat": 5, "compare": "transformers", "device": "cpu", "quiet": True}
    results = offline.run(workload="single", **settings)["results"]
    results += offline.run(workload="mixed", scale=8, requests=64, **settings)["results"]
    print(offline.table(results))
    keep(records.record(results, COMMAND), OFFLINE)

    with LLM(max_num_seqs=ROWS, enable_prefix_caching=False, device="cpu") as llm:
        work = workloads.make("mixed", llm.model_config.vocab_size, scale=8, requests=36)
        params = [SamplingParams(max_tokens=each.output_tokens, ignore_eos=True) for each in work]
        for _ in ("to warm up", "to keep"):
            done = llm.generate([each.prompt for each in work], params)
    start = min(each.arrival_time for each in done)
    spans = [
        {
            "input_tokens": len(each.prompt_token_ids),
            "output_tokens": len(each.token_ids),
            "first_token_s": round(each.first_token_time - start, 5),
            "finish_s": round(each.finish_time - start, 5),
        }
        for each in done
    ]
    keep(records.record(spans, COMMAND, rows=ROWS), TIMELINE)


def keep(record: dict, name: str) -> None:
    records.write(record, records.RESULTS / f"{name}.json")


def pairs() -> list[tuple[dict, dict]]:
    """For each workload of the record: minillm's result, and transformers' best."""
    results = records.read(OFFLINE)["results"]
    ours = [row for row in results if row["engine"] == "minillm"]
    peers = [row for row in results if row["engine"] == "transformers"]
    return [
        (row, max((p for p in peers if p["workload"] == row["workload"]), key=lambda p: p["output_tokens_per_s"]))
        for row in ours
    ]


def describe(row: dict) -> str:
    """A workload in the README's words."""
    if row["requests"] == 1:
        return f"one request, {row['input_tokens']} tokens in, {row['output_tokens']} out"
    return f"{row['requests']} requests of mixed lengths, {row['output_tokens']:,} tokens out"


def figures() -> str:
    """The README's table of figures."""
    record = records.read(OFFLINE)
    machine, transformers = record["machine"], record["versions"]["transformers"]
    lines = ["| output tokens per second | minillm | transformers | times |", "|---|---|---|---|"]
    for ours, best in pairs():
        speeds = f"{ours['output_tokens_per_s']:,.0f} | {best['output_tokens_per_s']:,.0f} (batch {best['batch']})"
        lines.append(f"| {describe(ours)} | {speeds} | {ours['times_transformers']:.2f} |")
    example = pairs()[0][0]
    return "\n".join(
        [
            *lines,
            "",
            f"`tiny-gemma` in {example['dtype']} on {machine['cores']} cores ({machine['cpu']}), beside transformers",
            f"{transformers}'s `generate` at the best of its static batches; medians of {len(example['runs'])} "
            "alternating runs in one process.",
            f"All of them are in the record: [`data/results/{OFFLINE}.json`](data/results/{OFFLINE}.json).",
            "",
        ]
    )


def fill(readme: str) -> str:
    """The README with its figures written in."""
    return BLOCK.sub(lambda found: found[1] + figures() + found[2], readme)


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # Without a salt and with a date, every drawing of the same record would be another file.
    matplotlib.rcParams["svg.hashsalt"] = "minillm"
    record = records.read(TIMELINE)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.2), width_ratios=(1.7, 1), layout="constrained", facecolor="white"
    )
    spans = sorted(record["results"], key=lambda each: each["first_token_s"])
    for place, each in enumerate(spans):
        left.barh(place, each["first_token_s"], color="#dddddd", height=0.8)
        length = each["finish_s"] - each["first_token_s"]
        left.barh(place, length, left=each["first_token_s"], color="tab:blue", height=0.8)
    left.set(xlabel="seconds", ylabel="requests, in the order they start", yticks=[])
    left.set_title(
        f"{len(spans)} requests share {record['rows']} places: as one leaves, the next joins\n"
        "(grey: waiting; blue: generating)",
        fontsize=10,
    )
    left.invert_yaxis()

    labels, ours, theirs = [], [], []
    for mine, best in pairs():
        labels.append("one request" if mine["requests"] == 1 else f"{mine['requests']} requests,\nmixed lengths")
        ours.append(mine["output_tokens_per_s"])
        theirs.append(best["output_tokens_per_s"])
    places = range(len(labels))
    for shift, values, name, color in (
        (-0.2, ours, "minillm", "tab:blue"),
        (0.2, theirs, "transformers, best batch", "#bbbbbb"),
    ):
        bars = right.bar([place + shift for place in places], values, 0.38, label=name, color=color)
        right.bar_label(bars, fmt="{:,.0f}", fontsize=9)
    right.set_xticks(list(places), labels)
    right.set_title(f"output tokens per second, {record['machine']['cores']} CPU cores", fontsize=10)
    right.legend(frameon=False, loc="upper left")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    if sys.argv[1:] == ["record"]:
        measure()
    elif sys.argv[1:]:
        sys.exit(__doc__)
    draw()
    readme = ROOT / "README.md"
    readme.write_text(fill(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
