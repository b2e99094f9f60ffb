"""Run minillm inside a real Triton Inference Server on the CPU, and compare it with minillm's own server.

    make triton
    python tools/triton_server.py --record triton

`make triton` installs Triton in build/triton/venv first. The script writes a model repository to build/triton/models
and starts Triton on it. Triton's clients ask both servers over HTTP and gRPC, and every answer must equal the engine's
own. Then all requests of a mix of short and long answers are sent at once, to three servers that run at most eight
requests in a step: Triton with dynamic batching, Triton with a decoupled model, and minillm's server.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from minillm import LLM, SamplingParams  # noqa: E402
from minillm.bench import records  # noqa: E402
from minillm.deploy.ports import free_ports  # noqa: E402

SOURCE, BUILD, MODEL = ROOT / "tools" / "triton", ROOT / "build" / "triton", ROOT / "data" / "tiny-gemma"
PROMPT, TOKENS = "The river", 24
REQUESTS, LENGTHS, REPEAT = 32, (8, 8, 8, 160), 5  # three answers in four are short
SECONDS = 120  # until a server is ready or has answered
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def triton_folder() -> tuple[Path, Path]:
    """The folders of Triton's environment: its packages, and the server among them. Exits if it is not installed."""
    packages = BUILD / "venv" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    server = packages / "pytriton" / "tritonserver"
    if not server.is_dir():
        sys.exit(f"Triton is not in {packages}: run `make triton`, on Linux with an x86-64 CPU")
    return packages, server


def write_repository(server: Path) -> Path:
    """Write the model repository, and give Triton's Python backend the program for this Python."""
    models = BUILD / "models"
    shutil.rmtree(models, ignore_errors=True)
    shutil.copytree(SOURCE / "models", models, ignore=shutil.ignore_patterns("__pycache__"))
    (models / "ensemble" / "1").mkdir()  # a version without files: Triton wants the folder
    stub = server / "backends" / "python" / "triton_python_backend_stub"
    stub.unlink(missing_ok=True)
    stub.symlink_to(server / "python_backend_stubs" / sysconfig.get_python_version() / stub.name)
    return models


def triton_command(http: int, grpc: int) -> tuple[list[str], dict[str, str], Path]:
    """Triton's command, its environment, and the folder that it runs in.

    Its Python backend embeds a Python without a virtual environment, which looks for modules in the working folder
    first. numpy must be the one of Triton's environment: the backend was built for numpy 1.
    """
    packages, server = triton_folder()
    models = write_repository(server)
    command = [str(server / "bin" / "tritonserver"), f"--model-repository={models}"]
    command += [f"--backend-directory={server / 'backends'}", "--exit-timeout-secs=5", "--allow-metrics=false"]
    command += [f"--http-port={http}", f"--grpc-port={grpc}", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1"]
    libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
    environment = os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "PYTHONHOME": sys.base_prefix,
        "MINILLM_PATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]),
        "MINILLM_MODEL": str(MODEL),
        "OMP_NUM_THREADS": "1",
    }
    return command, environment, packages


@contextmanager
def started(name: str, url: str, command: list[str], environment: dict[str, str], folder: Path) -> Iterator[None]:
    """A server that runs until the block ends. Exits with the end of its log if it does not become ready."""
    log = BUILD / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=file, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + SECONDS
        while not ready(url):
            if process.poll() is not None or time.monotonic() > end:
                tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
                sys.exit(f"{name} did not become ready; {log} ends with:\n{tail}")
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def post(url: str, body: dict) -> str:
    """A response's text. Raises RuntimeError with the server's message."""
    data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, kind), timeout=SECONDS) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url}: {error.read().decode()}") from None


def texts_of_all(triton: str, grpc: int, ours: str) -> dict[str, str]:
    """What each way to ask answers to PROMPT."""
    words = [str(BUILD / "venv" / "bin" / "python"), str(SOURCE / "client.py"), triton.removeprefix("http://")]
    words += [f"127.0.0.1:{grpc}", ours.removeprefix("http://"), PROMPT, str(TOKENS)]
    found = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, timeout=SECONDS).stdout)
    body = {"text_input": PROMPT, "max_tokens": TOKENS}
    for where, url, more in (
        ("in_flight", f"{triton}/v2/models/in_flight", {}),
        ("ensemble", f"{triton}/v2/models/ensemble", {}),
        ("minillm", f"{ours}/v2/models/{MODEL.name}", GREEDY),
    ):
        found[f"generate, {where}"] = json.loads(post(f"{url}/generate", body | more))["text_output"]
        if where != "ensemble":
            lines = post(f"{url}/generate_stream", body | more | {"stream": True}).split("\n\n")
            pieces = [json.loads(line.removeprefix("data: "))["text_output"] for line in lines if line.strip()]
            found[f"generate_stream, {where}"] = "".join(pieces)
    return found


def run(url: str, settings: dict, lengths: list[int]) -> tuple[float, list[float]]:
    """Send all requests at once; returns the seconds until all answers, and until each one."""

    def ask(length: int) -> float:
        begin = time.perf_counter()
        post(f"{url}/generate", {"text_input": PROMPT, "max_tokens": length} | settings)
        return time.perf_counter() - begin

    with ThreadPoolExecutor(REQUESTS) as threads:
        begin = time.perf_counter()
        waited = list(threads.map(ask, lengths))
        return time.perf_counter() - begin, waited


def measure(servers: dict[str, tuple[str, dict]]) -> list[dict]:
    """A row for each server: the median of REPEAT runs by total time. The servers take turns.

    servers: name -> the model's address and the settings of its requests.
    """
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(REQUESTS)]
    random.Random(0).shuffle(lengths)
    runs: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in servers}
    for round_number in range(REPEAT + 1):
        for name, (url, settings) in servers.items():
            done = run(url, settings, lengths)
            if round_number > 0:  # the first round warms up
                runs[name].append(done)
    rows = []
    for name, done_runs in runs.items():
        seconds, waited = sorted(done_runs)[REPEAT // 2]
        short = [each for each, length in zip(waited, lengths, strict=True) if length == min(LENGTHS)]
        rows.append(
            {
                "engine": name,
                "workload": "short and long answers",
                "dtype": "float32",
                "requests": REQUESTS,
                "output_tokens": sum(lengths),
                "seconds": seconds,
                "output_tokens_per_s": sum(lengths) / seconds,
                "short_answers_median_s": statistics.median(short),
                "runs": [each for each, _ in done_runs],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", help="a record's name, or a file")
    options = parser.parse_args()
    begun = records.begin(options.record)
    with LLM(MODEL, device="cpu", dtype="float32") as llm:
        (expected,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    http, grpc, own = free_ports(3)
    triton, ours = f"http://127.0.0.1:{http}", f"http://127.0.0.1:{own}"
    serve = [sys.executable, "-m", "minillm.cli", "serve", str(MODEL), "--port", str(own), "--device", "cpu"]
    serve += ["--dtype", "float32", "--max-num-seqs", "8"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with started("triton", triton, *triton_command(http, grpc)), started("minillm", ours, serve, environment, ROOT):
        found = texts_of_all(triton, grpc, ours)
        for way, text in found.items():
            print(f"{'same text' if text == expected.text else 'OTHER TEXT':10}  {way}", flush=True)
        if wrong := [way for way, text in found.items() if text != expected.text]:
            sys.exit(f"the engine answers {expected.text!r}, but {wrong[0]}: {found[wrong[0]]!r}")
        results = measure(
            {
                "Triton, dynamic batching": (f"{triton}/v2/models/batched", {}),
                "Triton, in-flight batching": (f"{triton}/v2/models/in_flight", {}),
                "minillm": (f"{ours}/v2/models/{MODEL.name}", GREEDY),
            }
        )
    print(f"\n{'':28}{'tokens/s':>10}{'all answers':>14}{'short answers, median':>24}")
    for row in results:
        figures = (
            f"{row['output_tokens_per_s']:>10.0f}{row['seconds']:>12.2f} s{row['short_answers_median_s']:>22.2f} s"
        )
        print(f"{row['engine']:28}{figures}")
    if options.record:
        lines = (SOURCE / "requirements.txt").read_text(encoding="utf-8").splitlines()
        installed = [line for line in lines if not line.startswith("#")]
        more = {
            "model": MODEL.name,
            "triton_environment": installed,
            "same_text": list(found),
            "lengths": list(LENGTHS),
            "rows": 8,
        }
        records.write(records.record(results, begun, **more), options.record)


if __name__ == "__main__":
    main()
