"""Renew the committed records of this machine's device by running their commands again.

    python tools/renew_records.py --list
    python tools/renew_records.py ablation start

Without a name, all records of the device are renewed. Each record stores its command, and a test checks that `RECORDS`
holds the same one. If a command fails, the old record stays in place.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from minillm.bench import records  # noqa: E402

GEMMA = "--model gemma-2b --load-format dummy"
WORKLOADS = "--workload single --workload chat --workload mixed --workload silo --workload liso --workload lilo"
SHAPE_LOADS = "--workload single --workload mixed --workload liso --repeat 1"
AS_PEERS = "--max-model-len 4096 --gpu-memory-utilization 0.85 --max-num-seqs 3000"
FP8 = "--quantization fp8 --quantized-head fp8"
GROUPS = ",".join(f"{method}-g{size}" for size in (32, 64, 128) for method in ("int4", "awq", "gptq"))
SPARSE = ",".join(["sparse24", *(f"pruned-s{percent}" for percent in range(20, 90, 10))])
DRAFTS = f"python tools/speculation_speed.py {GEMMA} --dtype bfloat16"
SYNTHETIC = "--parts worst synthetic --drafts 7 3 --right 0.7 0.8 --output-len 256 --rounds 2"
# device -> record -> its command without the last word, which is the record's name.
RECORDS = {
    "cpu": {
        "adapters": "python data/train_adapters.py --measure --out data/adapters --record",
        "adapter-ranks": "python data/adapter_ranks.py --record",
        "adapter-loading": "python tools/adapter_loading.py --model smollm2-135m --output-len 120 --record",
        "abuse": "python tools/abuse_server.py --record",
        "batching": "minillm bench batching --json",
        "busy-machine": "python tools/busy_machine.py --record",
        "busy-machine-16": "python tools/busy_machine.py --busy 0 1 4 12 --rounds 7 --record",
        "distillation": "python data/distill_tiny_gemma.py --record",
        "draft-draws": "python tools/draft_draws.py build/draft --record",
        "faults": "python tools/plant_faults.py --jobs 2 --record",
        "large-model": "python -m minillm.course.lesson_99.large_model --json",
        "open-loop": "python -m minillm.course.lesson_99.knee --json",
        "pipeline-bubble": "python tools/pipeline_bubble.py --stages 2 3 --record",
        "pruning": "python data/prune_and_distill.py --out build/draft --record",
        "quantization": "minillm eval --compare --device cpu --dtype float32 --json",
        "quantization-seeds": f"minillm eval --compare {GROUPS} --seeds 5 --device cpu --dtype float32 --json",
        "replicas": "python tools/replicas.py --pairs 3 --record",
        "routing": "python tools/routing.py --record",
        "smollm2-135m": "python tools/real_model.py smollm2-135m --record",
        "sparsity": f"minillm eval --compare {SPARSE} --device cpu --dtype float32 --json",
        "speculation": "python tools/speculation_speed.py --record",
        "streaming": "minillm eval --streaming --attention-sinks 4 --attention-window 1024 --json",
        "tiny-gemma-quality": "minillm eval --device cpu --dtype float32 --json",
        "trace-overhead": "python tools/trace_overhead.py --record",
        "triton": "python tools/triton_server.py --record",
    },
    "h100": {
        "quantized-smollm2-135m": "python tools/quantized_real_model.py smollm2-135m --speed-within 120 --record",
    },
    "h200": {
        "ablation": f"minillm bench ablation {GEMMA} --json",
        "batching": f"minillm bench batching {GEMMA} --repeat 7 --json",
        "build": "minillm build gemma-2b --load-format dummy --input-len 1024 --output-len 256 --concurrency 256 "
        "--compare --out build/gemma-2b.plan.json --json",
        "adapter-speed": f"python tools/adapter_speed.py {GEMMA} --dtype bfloat16 --rounds 5 --record",
        "cache-speed": "python tools/cache_speed.py --record",
        "fast-accumulation": "python tools/fast_accumulation.py --record",
        "gemma-2-2b": f"minillm bench offline --model gemma-2-2b --load-format dummy {AS_PEERS} {SHAPE_LOADS} --json",
        "gemma-2b-bf16": f"minillm bench offline {GEMMA} {AS_PEERS} {WORKLOADS} --json",
        "gemma-2b-fp8": f"minillm bench offline {GEMMA} {FP8} {AS_PEERS} {WORKLOADS} --json",
        "gemma-2b-fp8-cache": f"minillm bench offline {GEMMA} {FP8} --kv-cache-dtype fp8 {AS_PEERS} {WORKLOADS} --json",
        "kernel-tests": "python tools/kernel_tests.py --seeds 3 --within 140 --record",
        "kernels": "python tools/kernel_speed.py --record",
        "lessons": "python -m minillm.course.making.run --json",
        "prefill-attention": "python tools/prefill_speed.py --record",
        "quantization": "python tools/quantization_speed.py --record",
        "qwen3-0.6b": f"minillm bench offline --model qwen3-0.6b --load-format dummy {AS_PEERS} {SHAPE_LOADS} --json",
        "reduce": "python tools/reduce_speed.py --record",
        "sampled-speed-2": "python tools/sampled_speed.py --tensor-parallel-size 2 --runs 1 --kinds temperature "
        "'top_p 0.95' 'presence_penalty 0.5' 'logprobs 5' --record",
        "several-gpus-cache": f"python tools/several_gpus.py --cache {GEMMA} --repeat 1 --record",
        "several-gpus-llama-3.1-8b": "python tools/several_gpus.py --model llama-3.1-8b --load-format dummy "
        "--requests 256 --repeat 1 --max-model-len 4096 --record",
        "several-gpus": f"python tools/several_gpus.py {GEMMA} --requests 256 --repeat 1 --record",
        "pruning-smollm2-135m": "python data/prune_and_distill.py --model smollm2-135m --own-text 8000000 --layers 4 "
        "--hidden 576 --intermediate 1536 --heads 9 --head-tokens 8192 --rows 32 --steps 1600 "
        "--out build/smollm2-draft --held-out data/text/held_out.txt --record",
        "speculation": f"{DRAFTS} {SYNTHETIC} --record",
        "speculation-ahead": f"{DRAFTS} --ahead {SYNTHETIC} --record",
        "speculation-exact": f"{DRAFTS} --parts exact --output-len 128 --rounds 2 --record",
        "speculation-smollm2-135m": "python tools/speculation_speed.py --ahead --parts tasks --record",
        "quantized-kernels": "python tools/quantized_kernels.py --record",
        "roofline": f"minillm bench roofline {GEMMA} --max-num-seqs 512 --max-model-len 4096 "
        "--batch 1 --batch 8 --batch 64 --batch 256 --batch 512 --prompt 400 --prompt 2048 --json",
        "roofline-workloads": f"minillm bench roofline {GEMMA} --max-num-seqs 3000 --max-model-len 2816 "
        f"{WORKLOADS} --json",
        "sampled-serving": f"python tools/sampled_serving.py {GEMMA} --record",
        "sampled-speed": "python tools/sampled_speed.py --record",
        "sampled-speed-trained": "python tools/sampled_speed.py --model smollm2-135m --record",
        "serving": f"python tools/serving_speed.py {GEMMA} --record",
        "splits": "python tools/kernel_splits.py --record",
        "start": "python tools/start.py --record",
        "tiles": "python tools/kernel_tiles.py --record",
        "trace-overhead": "python tools/trace_overhead.py --pairs 15 --requests 1000 --timed 1 --record",
    },
}


def command(device: str, name: str) -> list[str]:
    """The words of a record's command, to run in the project root."""
    return [*shlex.split(RECORDS[device][name]), name]


def renew(device: str, name: str) -> bool:
    """Run one command; True if it succeeded."""
    words = command(device, name)
    program = [sys.executable, "-m", "minillm.cli"] if words[0] == "minillm" else [sys.executable]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    begin = time.perf_counter()
    done = subprocess.run([*program, *words[1:]], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    outcome = "ok" if done.returncode == 0 else "FAILED"
    print(f"{device}/{name}  {time.perf_counter() - begin:.0f} s  {outcome}", flush=True)
    return done.returncode == 0


def main() -> int:
    device = records.folder().name
    known = RECORDS.get(device, {})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"default: all of {device}: {', '.join(known)}")
    parser.add_argument("--list", action="store_true", help="only print the commands")
    options = parser.parse_args()
    if unknown := set(options.names) - set(known):
        parser.error(f"no command for {', '.join(sorted(unknown))} on {device}; known: {', '.join(known) or 'none'}")
    if options.list:
        print("\n".join(shlex.join(command(device, name)) for name in known))
        return 0
    failed = [name for name in options.names or known if not renew(device, name)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
