"""Measure how fast sampled traffic is served with each kind of option, as a share of plain temperature's.

    python tools/sampled_serving.py --model gemma-2b --load-format dummy --record sampled-serving

As `sampled_speed.py`, but over HTTP: one server, 128 tokens in and 128 out, streamed, from many clients. The kinds
alternate; a share is of the medians.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from sampled_speed import KINDS  # noqa: E402
from serving_speed import measured, serving  # noqa: E402

from minillm.bench import records  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="data/tiny-gemma")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--generators", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6, help="requests of each client in a run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--record", help="write the results to this file, or to the committed record of this name")
    given = parser.parse_args()
    begun = records.begin(given.record)
    options = ["--model", given.model, "--load-format", given.load_format, "--max-model-len", "1024"]
    options += ["--max-num-seqs", str(given.clients)]
    found: dict[str, list[dict]] = {kind: [] for kind in KINDS if kind != "greedy"}
    with serving(options, "bf16", given.workers) as url:
        for run in range(given.runs):
            for kind, rows in found.items():
                rows.append(measured(url, given.clients, given.generators, given.rounds, 1, KINDS[kind], run))
                print(kind, rows[-1]["output_tokens_per_s"], flush=True)
    rates = {kind: [row["output_tokens_per_s"] for row in rows] for kind, rows in found.items()}
    plain = statistics.median(rates["temperature"])
    results = [
        {
            "kind": kind,
            "concurrency": given.clients,
            "workers": given.workers,
            "input_len": 128,
            "output_len": 128,
            "output_tokens_per_s": statistics.median(each),
            "share": round(statistics.median(each) / plain, 4),
            "runs": each,
        }
        for kind, each in rates.items()
    ]
    print(json.dumps({row["kind"]: row["share"] for row in results}))
    if given.record is not None:
        model = f"{given.model}, random weights" if given.load_format == "dummy" else given.model
        records.write(records.record(results, begun, model=model), given.record)


if __name__ == "__main__":
    main()
