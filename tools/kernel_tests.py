"""Run the kernel and engine tests on this GPU and record the results; needs a GPU.

    python tools/kernel_tests.py --record kernel-tests --seeds 3

Kernel tests run once per seed, engine tests with the first seed only. Every comparison with a float64 reference is
logged (`tests/kernels/compare.py`), and the record holds the largest error of each kernel and dtype with its bound. If
compute-sanitizer is installed, a few kernel tests also run under its memcheck.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from minillm.bench import records  # noqa: E402

ENGINE = [
    "tests/engine/test_engine_on_gpu.py",
    "tests/engine/test_engine_on_gpu_logits.py",
    "tests/engine/test_random_requests.py",
]
STRESS = ["tests/engine/test_engine_on_gpu_single_row.py"]
ALONE = ["tests/engine/test_engine_on_gpu_memory.py"]  # it measures the whole GPU's memory
TO_REPORT = 60  # seconds that an interrupted run may take to say what failed
CHECKED = "test_attention_of_one_row and 256 or test_a_product or test_gate or test_decode_attention and mqa_256"


def pytest(paths: list[str], notes: Path, *options: str, seed: int, within: int) -> dict:
    """Run pytest once; returns the number of tests, failures and skips, and the seconds.

    A run that takes longer than `within` seconds is interrupted: `timed_out` is set, and the rest is of what has run.
    """
    report = notes.with_name(f"report-{Path(paths[0]).stem}-{seed}.xml")
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--durations=9", f"--junitxml={report}"]
    command += [f"--hypothesis-seed={seed}", *options, *paths]
    environment = os.environ | {"MINILLM_NOTES": str(notes), "MINILLM_TEST_SEED": str(seed)}
    late = {"timed_out": within}
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True) as process:
        try:
            said, late = process.communicate(timeout=within), {}
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then reports the tests that have run
            try:
                said = process.communicate(timeout=TO_REPORT)
            except subprocess.TimeoutExpired:
                process.kill()
                said = process.communicate()
    print(said[0][-6000:], said[1][-1000:], flush=True)
    if late and not report.exists():
        return {"of": paths, "seed": seed, **late}
    suite = ElementTree.parse(report).getroot().find("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    failed = []
    for case in suite.iter("testcase"):
        for why in (*case.iter("failure"), *case.iter("error")):
            failed.append(f"{case.get('classname')}::{case.get('name')}")
            print(failed[-1], (why.text or "")[-3000:], case.findtext("system-out", "")[-2000:], sep="\n", flush=True)
    seconds = round(float(suite.get("time")), 1)
    return {"of": paths, "seed": seed, **counts, "failed": failed, "seconds": seconds, **late}


def largest(notes: Path) -> list[dict]:
    """The comparison with the largest error, for each kernel and dtype."""
    found: dict[tuple[str, str], dict] = {}
    for line in notes.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        row = found.setdefault(
            (one["what"], one["dtype"]),
            {"kernel": one["what"], "dtype": one["dtype"], "largest_error": 0.0, "bound": one["bound"], "compared": 0},
        )
        row["compared"] += 1
        if one["error"] >= row["largest_error"]:
            row |= {"largest_error": one["error"], "seed": one["seed"]}
    return [found[key] for key in sorted(found)]


def memcheck(within: int) -> dict:
    """Run a few kernel tests under compute-sanitizer, without torch's caching allocator, which would hide errors."""
    binary = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if binary is None:
        return {"ran": False, "why": "compute-sanitizer is not installed on this machine"}
    command = [binary, "--tool", "memcheck", "--error-exitcode", "66", sys.executable, "-m", "pytest", "-q"]
    command += ["tests/kernels/test_single_row.py", "tests/kernels/test_kernels.py", "-k", CHECKED]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, env=environment, cwd=ROOT, timeout=within, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return {"ran": False, "why": f"not finished within {within} s"}
    said = done.stdout + done.stderr
    print(said[-3000:], flush=True)
    summary = re.findall(r"ERROR SUMMARY: .*", said)
    tests = re.findall(r"\d+ passed.*", said)
    return {"ran": bool(summary), "tool": "memcheck", "summary": summary[-1:], "tests": tests[-1:], "only": CHECKED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", help="a record's name, or a file")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--within", type=int, default=300, help="time limit of each run, in seconds")
    parser.add_argument("--skip", nargs="*", default=[], choices=["kernels", "engine", "stress", "alone", "memcheck"])
    options = parser.parse_args()
    begun, seeds = records.begin(options.record), [random.SystemRandom().randrange(2**31) for _ in range(options.seeds)]
    # Spinning threads would take cores away from the other workers.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // options.workers)))
    parallel = ["-n", str(options.workers)] if options.workers > 1 else []
    within = options.within
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes.jsonl"
        notes.touch()

        def kernels() -> list[dict]:
            # Compiling for other GPUs does not need this one.
            left_out = ["--ignore=tests/kernels/test_compile.py", *parallel]
            return [pytest(["tests/kernels"], notes, *left_out, seed=seed, within=within) for seed in seeds]

        parts = {
            "kernels": kernels,
            "engine": lambda: [pytest(ENGINE, notes, "-rP", *parallel, seed=seeds[0], within=within)],
            "stress": lambda: [pytest(STRESS, notes, "-rP", seed=seeds[0], within=within)],
            "memcheck": lambda: memcheck(within),
            "alone": lambda: [pytest(ALONE, notes, "-rP", seed=seeds[0], within=within)],
        }
        wanted = {name: part for name, part in parts.items() if name not in options.skip}
        alone = wanted.pop("alone", None)
        with ThreadPoolExecutor() as pool:
            done = {name: pool.submit(part) for name, part in wanted.items()}
            found = {name: future.result() for name, future in done.items()}
        if alone:
            found["alone"] = alone()
        more = {"compute_sanitizer": found.pop("memcheck")} if "memcheck" in found else {}
        runs = [run for part in found.values() for run in part]
        results = largest(notes)
    content = records.record(results, begun, seeds=seeds, runs=runs, **more)
    for row in results:
        print(
            f"{row['kernel']:<55}{row['dtype']:<10}{row['largest_error']:>12.2e}{row['bound']:>12.0e}{row['compared']:>7}"
        )
    print(json.dumps({"runs": runs, **more}, indent=1))
    if options.record:
        records.write(content, options.record)
    sys.exit(not clean(content))


def clean(record: dict) -> bool:
    """Whether the record shows no failure, no timeout and no compute-sanitizer error."""
    ended = all("timed_out" not in run and not run["failures"] and not run["errors"] for run in record["runs"])
    checked = record.get("compute_sanitizer", {"ran": False})
    return ended and (not checked["ran"] or checked["summary"] == ["ERROR SUMMARY: 0 errors"])


if __name__ == "__main__":
    main()
