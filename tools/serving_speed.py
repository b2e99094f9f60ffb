"""Measure the server over HTTP: 128 tokens in, 128 out, streamed, from clients in processes of their own.

    python tools/serving_speed.py --model gemma-2b --load-format dummy --record serving

Each server is started as `minillm serve` with one precision and one number of workers, then loaded by closed loops of
so many clients. `tokens_per_event` says how many tokens came in an event of a stream on average. The rows named offline
are the same engine without a server, one request of the same lengths at a time.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minillm.bench import generators, records, serve  # noqa: E402

LENGTH = 128
FP8 = ["--quantization", "fp8", "--quantized-head", "fp8", "--kv-cache-dtype", "fp8"]
PRECISIONS = {"bf16": [], "fp8": FP8}
# precision, workers, (clients, processes of the load generator)
SERVERS = (
    ("bf16", 1, ((1, 1), (64, 4), (512, 8))),
    ("bf16", 4, ((1, 1), (64, 4), (512, 8))),
    ("fp8", 4, ((64, 4), (512, 8))),
)
ROUNDS = 12  # requests of each client
ALONE = 40  # requests of a client that is alone
RUNS = 3
SHOWN = ("precision", "workers", "concurrency", "output_tokens_per_s", "runs", "tokens_per_event", "ttft_s", "itl_s")
LONG = ("each", "itl_by_position")  # left out of the record


def measured(
    url: str, clients: int, processes: int, rounds: int, runs: int, sampling: dict | None = None, first: int = 0
) -> dict:
    """The median of several runs, by output tokens per second, with the rates of all.

    sampling: more fields of each request. first: the first run's seed.
    """
    count = ALONE if clients == 1 else clients * rounds
    found = []
    for seed in range(first, first + runs):
        content = serve.run(
            url,
            concurrency=clients,
            generators=processes,
            input_len=LENGTH,
            output_len=LENGTH,
            requests=count,
            warmup=clients,
            seed=seed,
            sampling=sampling,
            quiet=True,
        )
        found.append({name: value for name, value in content["results"][0].items() if name not in LONG})
    found.sort(key=lambda row: row["output_tokens_per_s"])
    rates = [row["output_tokens_per_s"] for row in found]
    return found[len(found) // 2] | {"runs": rates, "generators": processes}


@contextmanager
def serving(options: list[str], precision: str, workers: int) -> Iterator[str]:
    """Start a server; yields its URL, without /v1."""
    command = [sys.executable, "-m", "minillm.cli", "serve", "--port", "0", "--workers", str(workers)]
    command += ["--log-level", "warning", "--no-enable-prefix-caching", *options, *PRECISIONS[precision]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            found = None
            while found is None:
                if not (line := process.stdout.readline()):
                    raise SystemExit("the server did not start")
                found = re.search(r"(http://\S+)/v1", line)
            yield found[1]
        finally:
            process.terminate()
            process.communicate()  # it says that it has stopped


def served(options: list[str], precision: str, workers: int, loads, rounds: int, runs: int) -> list[dict]:
    rows = []
    with serving(options, precision, workers) as url:
        for clients, generated in loads:
            row = {"precision": precision, "workers": workers}
            try:
                row |= measured(url, clients, generated, rounds, runs)
            except generators.LoadError as error:
                row |= {"concurrency": clients, "error": str(error)}
                print(error, flush=True)
            rows.append(row)
            print(json.dumps({name: value for name, value in row.items() if name in SHOWN}), flush=True)
    return rows


def offline(options: list[str], precision: str) -> dict:
    """One request at a time without a server, in a process of its own."""
    code = f"""
import json, sys, time
from minillm import LLM, SamplingParams
with LLM({options!r}[1], **json.loads(sys.argv[1])) as llm:
    params = SamplingParams(max_tokens={LENGTH}, temperature=1.0, ignore_eos=True)
    prompts = [[7 + (i * 31 + j * 17) % 4096 for j in range({LENGTH})] for i in range({ALONE} + 1)]
    llm.generate([prompts.pop()], params)
    begun = time.perf_counter()
    for prompt in prompts:
        llm.generate([prompt], params)
    print(json.dumps(time.perf_counter() - begun))
"""
    words = [*options[2:], *PRECISIONS[precision]]
    keys = {"enable_prefix_caching": False}
    for name, value in zip(words[::2], words[1::2], strict=True):
        keys[name.removeprefix("--").replace("-", "_")] = json.loads(value) if value[0].isdigit() else value
    done = subprocess.run([sys.executable, "-c", code, json.dumps(keys)], stdout=subprocess.PIPE, text=True, check=True)
    rate = round(ALONE * LENGTH / json.loads(done.stdout.splitlines()[-1]), 1)
    row = {"precision": precision, "workers": 0, "workload": "offline", "concurrency": 1, "output_tokens_per_s": rate}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="data/tiny-gemma")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--max-num-seqs", default="512")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="requests of each client")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--record", help="write the results to this file, or to the committed record of this name")
    arguments = parser.parse_args()
    options = ["--model", arguments.model, "--load-format", arguments.load_format]
    options += ["--max-num-seqs", arguments.max_num_seqs, "--max-model-len", "1024"]
    begun, results, start = records.begin(arguments.record), [], time.perf_counter()

    def keep(rows: list[dict]) -> None:
        results.extend(rows)
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
        if arguments.record is not None:
            model = f"{arguments.model}, random weights" if arguments.load_format == "dummy" else arguments.model
            records.write(records.record(results, begun, model=model), arguments.record)

    keep([offline(options, "bf16")])
    for precision, workers, loads in SERVERS:
        keep(served(options, precision, workers, loads, arguments.rounds, arguments.runs))


if __name__ == "__main__":
    main()
