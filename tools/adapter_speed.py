"""Measure what adapters (LoRA) cost: the same requests on two engines of one process, with and without, in turns.

    python tools/adapter_speed.py --model gemma-2b --load-format dummy --dtype bfloat16 --record adapter-speed

One engine has no adapters. The other one has `--adapters` of them, of `--rank` on all projections, with random numbers.
A row's `cost` is the median over rounds of the seconds with, divided by the seconds without, minus 1:

used 0     no request has an adapter: what it costs that some are loaded
used n     the requests take turns with n adapters

On a GPU decode steps are captured before. All adapters are one file: they differ in name alone, and each has a slot.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from minillm import LLM, SamplingParams  # noqa: E402
from minillm.bench import records  # noqa: E402
from minillm.model.config import ModelConfig  # noqa: E402

CASES = ((1, 0), (64, 0), (1, 1), (8, 8), (64, 8), (64, 64))  # requests at once, adapters that they use


def write_adapter(directory: Path, model: ModelConfig, rank: int) -> Path:
    """Write an adapter of all projections in PEFT's files, with small random numbers."""
    hidden, inner, heads = model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
    kv_heads = model.num_kv_heads * model.head_dim
    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    torch.manual_seed(0)
    tensors = {}
    for layer in range(model.num_layers):
        for name, (rows, columns) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, columns).mul_(columns**-0.5).bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank).mul_(0.01).bfloat16()
    directory.mkdir(parents=True)
    targets = [name.rpartition(".")[2] for name in shapes]
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(described))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def capture(llm: LLM, longest: int, batches: set[int]) -> None:
    """Capture the decode steps that requests of at most `longest` tokens need; nothing on a CPU."""
    graphs = llm.engine.executor.runner.graphs
    if graphs is not None:
        decodes, block = graphs.decodes, llm.engine.config.block_size
        widths = {decodes.width(blocks) for blocks in range(1, -(-longest // block) + 1)}
        sizes = [size for size in decodes.sizes if size <= max(batches)]
        graphs.capture(type(decodes.largest)(size, width) for size in sizes for width in widths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: tiny-gemma")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", metavar="NAME", help="write a record of this name")
    options = parser.parse_args()
    begun, results = records.begin(options.record), []
    made = {
        "device": options.device,
        "dtype": options.dtype,
        "load_format": options.load_format,
        "max_num_seqs": 64,
        "max_model_len": 1024,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.35,
    }
    with tempfile.TemporaryDirectory() as folder:
        plain = LLM(options.model, **made)
        place = write_adapter(Path(folder, "adapter"), plain.model_config, options.rank)
        names = [f"adapter-{i}" for i in range(options.adapters)]
        adapted = LLM(options.model, **made, adapters=dict.fromkeys(names, place), max_lora_rank=options.rank)
    for llm in (plain, adapted):
        capture(llm, options.input_len + options.output_len, {requests for requests, _ in CASES})
    params = SamplingParams(max_tokens=options.output_len, temperature=0, ignore_eos=True)
    for requests, used in CASES:
        if used > options.adapters:
            continue
        prompts = [[7 + i, *range(10, 9 + options.input_len)] for i in range(requests)]
        wanted = [names[i % used] for i in range(requests)] if used else None
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(-2, options.rounds):
            for each in (False, True) if turn % 2 else (True, False):
                begin = time.perf_counter()
                if each:
                    adapted.generate(prompts, params, adapter=wanted)
                else:
                    plain.generate(prompts, params)
                if turn >= 0:
                    seconds[each].append(round(time.perf_counter() - begin, 4))
        ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]
        results.append(
            {
                "model": options.model or "tiny-gemma",
                "dtype": plain.engine.facts.dtype,
                "requests": requests,
                "loaded": options.adapters,
                "used": used,
                "rank": options.rank,
                "input_tokens": options.input_len,
                "output_tokens": options.output_len,
                "cost": round(statistics.median(ratios) - 1, 4),
                "costs": [round(each - 1, 4) for each in ratios],
                "seconds_without": seconds[False],
                "seconds_with": seconds[True],
            }
        )
        print(json.dumps({key: value for key, value in results[-1].items() if "seconds" not in key}), flush=True)
        if options.record:
            records.write(records.record(results, begun), options.record)
    plain.close()
    adapted.close()


if __name__ == "__main__":
    main()
