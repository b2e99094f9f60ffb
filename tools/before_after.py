"""Compare the speed of two versions of the engine on the same GPU, in alternating runs.

    git archive --prefix=before/ COMMIT minillm kernels | tar -x -C build
    python tools/before_after.py --before build/before --workload chat --workload single --pairs 5 --record before-after

Each version runs in its own process, imported from its own folder. Both keep their model and cache in memory, but only
one runs at a time. A pair is one run of each. The machine's speed may drift by more than the versions differ, so the
result is the median over pairs of (seconds before / seconds after).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# The script that each version runs. It uses only features that all versions have.
WORKER = """
import json, sys, time
from minillm import LLM, SamplingParams
from minillm.bench import workloads

options = json.loads(sys.argv[1])
llm = LLM(options.pop("model"), enable_prefix_caching=False, **options)
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    work = workloads.make(asked.pop("workload"), llm.model_config.vocab_size, **asked)
    prompts = [each.prompt for each in work]
    params = [SamplingParams(max_tokens=each.output_tokens, temperature=1.0, ignore_eos=True) for each in work]
    start = time.perf_counter()
    done = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    assert [len(each.token_ids) for each in done] == [each.output_tokens for each in work]
    print(json.dumps(seconds), flush=True)
"""


class Version:
    """One version's process."""

    def __init__(self, folder: Path, options: dict):
        command = [sys.executable, "-c", WORKER, json.dumps(options)]
        environment = os.environ | {"PYTHONPATH": str(folder.resolve())}
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.answer()

    def seconds(self, workload: str, **more) -> float:
        self.process.stdin.write(json.dumps({"workload": workload} | more) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a version's process ended with status {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def compare(versions: dict[str, Version], workload: str, pairs: int, **less) -> dict:
    """Time both versions in alternating runs; which goes first alternates too. An initial run compiles kernels."""
    for version in versions.values():
        version.seconds(workload, **less)
    runs: dict[str, list[float]] = {name: [] for name in versions}
    for pair in range(pairs):
        for name in sorted(versions, reverse=bool(pair % 2)):
            runs[name].append(round(versions[name].seconds(workload, **less), 4))
    ratios = [before / after for before, after in zip(runs["before"], runs["after"], strict=True)]
    result = {"workload": workload, "speed_after_over_before": round(statistics.median(ratios), 4)}
    print(json.dumps(result | runs), file=sys.stderr, flush=True)
    return result | {"pairs": [round(ratio, 4) for ratio in ratios], "seconds": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the folder of the earlier version")
    parser.add_argument("--before-commit", help="the commit of that version, for the record")
    parser.add_argument("--workload", action="append", required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", default="gemma-2b")
    parser.add_argument(
        "--num-blocks", type=int, default=80_000, help="blocks for each version: both caches are in memory at once"
    )
    parser.add_argument("--max-num-seqs", type=int, default=3000)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quantization")
    parser.add_argument("--quantized-head")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--requests", type=int, help="use only this many requests")
    parser.add_argument("--record", help="a name in data/results, or a file")
    options = parser.parse_args()
    from minillm.bench import records, workloads

    begun = records.begin(options.record)
    names = [workloads.find(name).name for name in options.workload]
    sizes, formats = (
        ("num_blocks", "max_num_seqs", "max_model_len"),
        ("quantization", "quantized_head", "kv_cache_dtype"),
    )
    engine = {name: getattr(options, name) for name in ("model", "device", *sizes, *formats)}
    engine |= {"load_format": "dummy"}
    if Path(options.model).is_dir():
        engine["model"] = str(Path(options.model).resolve())
    folders = {"before": options.before, "after": ROOT}
    versions = {name: Version(folder, engine) for name, folder in folders.items()}
    less = {} if options.requests is None else {"requests": options.requests}
    try:
        results = [compare(versions, name, options.pairs, **less) for name in names]
    finally:
        for version in versions.values():
            version.close()
    more = {"model": records.model_name(options.model, random_weights=True), "before": options.before_commit}
    records.publish(
        records.record(results, begun, **more, settings=engine | less | {"model": options.model}), options.record
    )


if __name__ == "__main__":
    main()
