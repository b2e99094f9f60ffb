"""Measure the time from the command to the first token, with a cold and with a warm Triton cache.

    python tools/start.py --record start

Each start runs in a new process, with random weights in the shape of Gemma 2B. The first start finds an empty Triton
cache. `seconds` count from just before the process is launched.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
CHILD = """
import json, time, os
begun = float(os.environ["BEGUN"])
since = lambda: round(time.time() - begun, 2)
import torch, minillm
reached = {"imported": since()}
llm = minillm.LLM("gemma-2b", load_format="dummy", **json.loads(os.environ["OPTIONS"]))
reached["engine_ready"] = since()
def generate(tokens):
    return llm.generate([[1 + i % 90 for i in range(128)]], minillm.SamplingParams(max_tokens=tokens, ignore_eos=True))
generate(1)
reached["first_token"] = since()
generate(2)
reached["second_token_in_a_graph"] = since()
print(json.dumps(reached))
"""


def start(cache: Path, options: dict) -> dict:
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(cache),
        "OPTIONS": json.dumps(options),
        "BEGUN": str(time.time()),
    }
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", help="a record's name, or a file")
    parser.add_argument("--repeat", type=int, default=3, help="number of starts with kernels cached")
    parser.add_argument("--options", type=json.loads, default={"max_model_len": 2816, "max_num_seqs": 3000})
    options = parser.parse_args()
    from minillm.bench import records

    begun, results = records.begin(options.record), []
    with tempfile.TemporaryDirectory() as cache:
        for run in range(1 + options.repeat):
            seconds = start(Path(cache), options.options)
            results.append({"kernels_cached": run > 0, "seconds": seconds})
            print(json.dumps(results[-1]), flush=True)
    about = {"model": "gemma-2b, random weights", "options": options.options}
    content = records.record(results, begun, **about)
    if options.record:
        records.write(content, options.record)


if __name__ == "__main__":
    main()
