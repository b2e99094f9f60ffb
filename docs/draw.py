"""Draw the pictures and fill in the figures of the README and of docs/, from committed records only.

python docs/draw.py           draws docs/{at_work,batching,quantization}.svg and fills in the figures of PAGES
python docs/draw.py record    measures this machine first: data/results/cpu/{offline,timeline}.json
"""

import os
import re
import statistics
import sys
import textwrap
from pathlib import Path

from minillm import LLM, SamplingParams
from minillm.bench import batching, offline, plots, records, waste, workloads
from minillm.bench.load import other_load
from minillm.course.lesson_13 import speculating
from minillm.course.lesson_14 import measured
from minillm.course.shared import real_model
from minillm.report.findings import listed

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "measurements.md")
PICTURE, BATCHING_PICTURE = ROOT / "docs" / "at_work.svg", ROOT / "docs" / "batching.svg"
QUANTIZATION_PICTURE = ROOT / "docs" / "quantization.svg"
OFFLINE, TIMELINE = "cpu/offline", "cpu/timeline"
BUSY = ("cpu/busy-machine", "cpu/busy-machine-16")
BATCHING = ("cpu/batching", "h200/batching")  # those that exist are shown
GPU, GPU_PEER, START = "h200/gemma-2b-bf16", "h200/vllm-h200", "h200/start"
QUANTIZATION, LOSSES = "h200/quantization", "cpu/quantization"
REAL = real_model.RECORD
FP8, FP8_CACHE, FP8_PEER = "h200/gemma-2b-fp8", "h200/gemma-2b-fp8-cache", "h200/vllm-fp8kv-and-families-h200"
CACHE_SPEED = "h200/cache-speed"
SAMPLED, SAMPLED_OVER_HTTP, SAMPLED_TRAINED = "h200/sampled-speed", "h200/sampled-serving", "h200/sampled-speed-trained"
SHAPES = {"Qwen3 0.6B": "h200/qwen3-0.6b", "Gemma 2 2B": "h200/gemma-2-2b"}
PREFILL = "h200/prefill-attention"
SPECULATION, EXACT = "cpu/speculation", "h200/speculation-exact"
TASKS_ON_A_GPU = "h200/speculation-smollm2-135m"
ADAPTERS, SAMPLED_ON_TWO = "h200/adapter-speed", "h200/sampled-speed-2"
SERVING, SERVING_PEER = "h200/serving", "h200/vllm-server-h200"
COMMAND = "python docs/draw.py record"
QUIET = 0.1  # largest share of the CPU that other programs may use during a recorded measurement
ROWS = 12  # requests in one step of the timeline: few enough that some must wait


def measure() -> None:
    """Write both records. The single request runs at full length, the mixed ones at an eighth."""
    begun = records.begin()
    with other_load() as load:
        results, spans = compare(), follow()
    others = None if load.cores is None else round(load.cores / os.cpu_count(), 3)
    print(offline.table(results))
    if others is not None and others > QUIET:
        sys.exit(
            f"other programs used {others:.0%} of the CPU during the run, more than {QUIET:.0%}: stop them and measure "
            "again. Nothing was saved."
        )
    more = {"cpu_share_of_other_programs": others}
    records.write(records.record(results, begun, COMMAND, **more), records.RESULTS / f"{OFFLINE}.json")
    records.write(records.record(spans, begun, COMMAND, rows=ROWS, **more), records.RESULTS / f"{TIMELINE}.json")


def compare() -> list[dict]:
    """Both workloads, compared with transformers."""
    settings = {"repeat": 5, "compare": "transformers", "device": "cpu", "quiet": True}
    results = offline.run(workload="single", **settings)["results"]
    return results + offline.run(workload="mixed", scale=8, requests=64, **settings)["results"]


def follow() -> list[dict]:
    """The first-token and finish times of some mixed requests that share ROWS rows."""
    with LLM(max_num_seqs=ROWS, enable_prefix_caching=False, device="cpu") as llm:
        work = workloads.make("mixed", llm.model_config.vocab_size, scale=8, requests=36)
        params = [SamplingParams(max_tokens=each.output_tokens, ignore_eos=True) for each in work]
        for _ in ("warm-up", "measured"):
            done = llm.generate([each.prompt for each in work], params)
    start = min(each.arrival_time for each in done)
    return [
        {
            "input_tokens": len(each.prompt_token_ids),
            "output_tokens": len(each.token_ids),
            "first_token_s": round(each.first_token_time - start, 5),
            "finish_s": round(each.finish_time - start, 5),
        }
        for each in done
    ]


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
    """A workload as the tables describe it."""
    if row["requests"] == 1:
        return f"one request, {row['input_tokens']} tokens in, {row['output_tokens']} out"
    return f"{row['requests']} requests of mixed lengths, {row['output_tokens']:,} tokens out"


def figures() -> str:
    """The table of CPU figures."""
    record = records.read(OFFLINE)
    machine, transformers = record["machine"], record["versions"]["transformers"]
    lines = ["| output tokens per second | minillm | transformers | speedup |", "|---|---|---|---|"]
    for ours, best in pairs():
        speeds = f"{ours['output_tokens_per_s']:,.0f} | {best['output_tokens_per_s']:,.0f} (batch {best['batch']})"
        lines.append(f"| {describe(ours)} | {speeds} | {ours['times_transformers']:.2f} |")
    example = pairs()[0][0]
    return "\n".join(
        [
            *lines,
            "",
            f"`tiny-gemma` in {example['dtype']} on {machine['cores']} cores ({machine['cpu']}), compared with",
            f"transformers {transformers}'s `generate` at its best static batch size; medians of "
            f"{len(example['runs'])} alternating runs in one process.",
            f"All runs are in the record: [`data/results/{OFFLINE}.json`](data/results/{OFFLINE}.json).",
            "",
        ]
    )


def gpu_figures() -> str:
    """The table of GPU figures: each workload, and the peer's best run of it."""
    record, peer, starts = records.read(GPU), records.read(GPU_PEER), records.read(START)["results"]
    least, *_, most = sorted(max(ours[1:]) / best for ours, best in fp8_pairs().values())
    first, cached = (
        statistics.median(each["seconds"]["first_token"] for each in starts if each["kernels_cached"] == known)
        for known in (False, True)
    )
    lines = ["| workload | requests | minillm | vLLM | speedup |", "|---|---|---|---|---|"]
    for row in record["results"]:
        runs = [each for each in peer["results"] if (each["workload"], each["dtype"]) == (row["workload"], "bf16")]
        ours, best = row["output_tokens_per_s"], max(each["output_tokens_per_s"] for each in runs)
        lines.append(f"| {row['workload']} | {row['requests']:,} | {ours:,.0f} | {best:,} | {ours / best:.2f} |")
    text = (
        f"Output tokens per second on one {record['machine']['gpu']}: Gemma 2B's shape, random weights, bfloat16, all "
        "requests submitted at once, exact output lengths, temperature 1. A workload's name gives its input and output "
        "lengths; both engines with a maximum length of 4,096 tokens and 85% of the GPU's memory. minillm: the median "
        f"of {len(record['results'][0]['runs'])} runs. {peer['version'].replace('vllm', 'vLLM')}: each workload was "
        "timed once, after a warm-up of 64 requests (single: the best of three); where the record has two runs of a "
        f"workload, the table shows the better. Records: [minillm](data/results/{GPU}.json), "
        f"[vLLM](data/results/{GPU_PEER}.json), with all settings. The first token arrives {cached:.1f} s "
        f"([record](data/results/{START}.json)) after the command starts, or {first:.0f} s the first time, when "
        "kernels are compiled. "
        f"With FP8 weights in both engines, minillm generates {least:.2f} to {most:.2f} times as many tokens; over "
        f"HTTP, in bf16 and for 512 clients, {serving_speedup():.1f} times as many: see "
        "[docs/measurements.md](docs/measurements.md)."
    )
    return "\n".join([*lines, "", *wrapped(text), ""])


def quantization_figures() -> str:
    """The table of quantized models' speeds."""
    record = records.read(QUANTIZATION)
    methods: dict[str, dict[str, dict]] = {}
    for row in record["results"]:
        methods.setdefault(plots.precision(row), {}).setdefault(row["workload"], row)
    loads = {row["workload"]: row["requests"] for row in record["results"]}
    lines = [
        "| weights (by methods) | GB | " + " | ".join(f"{count:,}" for count in loads.values()) + " |",
        "|---|---|" + "---|" * len(loads),
    ]
    for method, found in methods.items():
        gains = (f"{found[load]['times_bf16']:.2f}" for load in loads)
        if method == "bf16":
            gains = (f"{found[load]['output_tokens_per_s']:,.0f} tokens/s" for load in loads)
        nbytes = next(iter(found.values()))["weight_bytes"]
        lines.append(f"| {method} | {nbytes / 1e9:.2f} | {' | '.join(gains)} |")
    first, last = list(loads)[0], list(loads)[-1]
    text = (
        f"Output tokens per second on one {record['machine']['gpu']}, as multiples of bf16's in the same run, for the "
        f"number of requests at the top: Gemma 2B's shape with random weights; the first columns as {first} (inputs of "
        f"128 tokens, outputs of 256), the last is {last}; the median of "
        f"{len(record['results'][0]['runs'])} runs. Record: [{QUANTIZATION}](data/results/{QUANTIZATION}.json)."
    )
    return "\n".join([*lines, "", *wrapped(text), ""])


def real_figures() -> str:
    """The table of what quantization costs a trained model, and of its speeds."""
    record, gains = records.read(REAL), real_model.gains()
    counts = list(gains["bfloat16"])
    lines = [
        "| method | MB | bits a weight | KL, millinats | 95% interval | perplexity | tokens/s, "
        + ", ".join(f"{count:,}" for count in counts)
        + " at once |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in real_model.quality().items():
        low, high = (f"{1000 * end:.2f}" for end in row["kl_interval"])
        losses = f"{1000 * row['kl']:.2f} | {low} to {high} | {100 * row['perplexity_loss']:+.2f}%"
        if name == "stored":
            losses = f"0 | | {row['perplexity']:.2f}"
        bits = f"{row['bits_per_weight']:.2f}" if "bits_per_weight" in row else ""
        size = f"{row['bytes'] / 1e6:.0f}" if "bytes" in row else ""
        speed = ", ".join(f"{gains[name][count]:.2f}" for count in counts) if name in gains else ""
        shown = f"{name} (simulated)" if row["simulated"] else name
        lines.append(f"| {shown} | {size} | {bits} | {losses} | {speed} |")
    text = (
        f"SmolLM2-135M-Instruct on one {record['machine']['gpu']}: KL and perplexity in float32 on {record['windows']} "
        f"windows of {record['window']} tokens of the lessons' prose, compared with the model as `minillm download` "
        "stores it; calibrated on other pages of the project. Intervals are of the mean over windows. Rows named "
        "cache-... change only keys and values. Speeds are multiples of bfloat16's, with inputs of 128 and outputs of "
        "256 tokens, in bfloat16: the model is small, and the largest gain is "
        f"{max(max(each.values()) for each in gains.values()):.2f} times. The weights had been rounded to "
        f"{record['rounded']} before, so rows below {real_model.FEW_BITS} bits compare methods, and do not say what "
        f"rounding the original model costs. Record: [{REAL}](data/results/{REAL}.json)."
    )
    return "\n".join([*lines, "", *wrapped(text), ""])


def real_in_short() -> str:
    """The README's sentences about a trained model."""
    rows = real_model.quality()
    loss = {name: f"{100 * row['perplexity_loss']:.1f}%" for name, row in rows.items()}
    text = (
        f"On a trained model, SmolLM2-135M-Instruct, int8 weights raise perplexity by {loss['int8']}, and int8 weights "
        f"and activations by {loss['w8a8']}; rotating the model first lowers the KL divergence of the latter from "
        f"{1000 * rows['w8a8']['kl']:.1f} to {1000 * rows['w8a8-rotate']['kl']:.1f} millinats. In 4 bits, perplexity "
        f"rises by {loss['int4']} with plain rounding and by {loss['awq']} with AWQ (of weights that had been rounded "
        "to four bits before): [all methods](docs/measurements.md#quantization-of-a-trained-model)."
    )
    return "\n".join([*wrapped(text), ""])


def fp8_pairs() -> dict[str, tuple[list[float], float]]:
    """Tokens/s of each workload: minillm's in bf16, with fp8 weights, and an fp8 cache too; the peer's best in fp8."""
    found = [
        {row["workload"]: row["output_tokens_per_s"] for row in records.read(name)["results"]}
        for name in (GPU, FP8, FP8_CACHE)
    ]
    peers = [row for name in (GPU_PEER, FP8_PEER) for row in records.read(name)["results"] if row["dtype"] == "fp8"]
    return {
        workload: (
            [each[workload] for each in found],
            max(row["output_tokens_per_s"] for row in peers if row["workload"] == workload),
        )
        for workload in found[0]
    }


def fp8_figures() -> str:
    """The table of fp8 engines."""
    lines = ["| workload | bf16 | fp8 | fp8, cache too | vLLM, fp8 | speedup |", "|---|---|---|---|---|---|"]
    for workload, (ours, best) in fp8_pairs().items():
        speeds = " | ".join(f"{speed:,.0f}" for speed in ours)
        lines.append(f"| {workload} | {speeds} | {best:,} | {max(ours[1:]) / best:.2f} |")
    text = (
        "Output tokens per second, measured as the table with bf16 in the README. fp8: weights and the head in e4m3, "
        "with scales for rows of the matrices and of the inputs; in the third column, keys and values too. vLLM: the "
        "best of its runs with fp8 weights and either cache. The speedup is that of our better column. Records: "
        f"[bf16](data/results/{GPU}.json), [fp8](data/results/{FP8}.json), "
        f"[with an fp8 cache](data/results/{FP8_CACHE}.json), [vLLM](data/results/{GPU_PEER}.json) and "
        f"[its fp8 cache](data/results/{FP8_PEER}.json)."
    )
    return "\n".join([*lines, "", *wrapped(text), ""])


def cache_figures() -> str:
    """The table of attention's speed over 8-bit caches."""
    record = records.read(CACHE_SPEED)
    found = {
        (row["kernel"], row["requests"], row["tokens"], row["kv_cache_dtype"]): row["times_bf16"]
        for row in record["results"]
    }
    lengths = sorted({tokens for kernel, _, tokens, _ in found if kernel == "decode_attention"})
    lines = [
        "| attention, times a bf16 cache | " + " | ".join(f"{tokens:,} tokens" for tokens in lengths) + " |",
        "|---|" + "---|" * len(lengths),
    ]
    for kernel in ("decode", "prefill"):
        for count in sorted({each[1] for each in found if each[0] == f"{kernel}_attention"}):
            cells = []
            for tokens in lengths:
                both = [found.get((f"{kernel}_attention", count, tokens, name)) for name in ("int8", "fp8")]
                cells.append(" / ".join(f"{each:.2f}" for each in both) if all(both) else "")
            of = "1 request" if count == 1 else f"{count} requests"
            lines.append(f"| {kernel}, {of}: int8 / fp8 | {' | '.join(cells)} |")
    text = (
        "Above 1, attention over the 8-bit cache is faster. Each pair is one layer of Gemma 2B's shape on one "
        f"{record['machine']['gpu']}, by the median of {len(record['results'][0]['runs'])} runs in which the caches "
        f"alternate. Record: [{CACHE_SPEED}](data/results/{CACHE_SPEED}.json)."
    )
    return "\n".join([*lines, "", *wrapped(text), ""])


def serving_speedup(clients: int = 512) -> float:
    """Our best server's output tokens per second over the peer's best, both in bf16."""
    ours, peers = records.read(SERVING)["results"], records.read(SERVING_PEER)["results"]
    best = max(
        row["output_tokens_per_s"] for row in ours if (row["precision"], row["concurrency"]) == ("bf16", clients)
    )
    return best / max(row["output_tokens_per_s"] for row in peers if row["clients"] == clients)


def sampled_figures() -> str:
    """The table of sampled traffic: shares of plain temperature's speed, and milliseconds of the kernels."""
    record = records.read(SAMPLED)
    shares = {row["kind"]: row["share"] for row in record["results"] if row["workload"] == "generate"}
    ms = {
        (row["logits"], row["rows"], row["kind"]): row["ms"] for row in record["results"] if row["workload"] == "sample"
    }
    http, trained = records.read(SAMPLED_OVER_HTTP), records.read(SAMPLED_TRAINED)
    served, small = ({row["kind"]: row["share"] for row in each["results"]} for each in (http, trained))
    sizes = [(logits, rows) for logits in ("flat", "peaked") for rows in (64, 512)]
    lines = [
        "| sampling | share of the speed | over HTTP | a small model | "
        + " | ".join(f"{logits}, {rows} rows, ms" for logits, rows in sizes)
        + " |",
        "|---|---|---|---|" + "---|" * len(sizes),
    ]
    for kind, share in shares.items():
        others = f"{served[kind]:.2f}" if kind in served else "", f"{small[kind]:.2f}"
        times = [f"{ms[*size, kind]:.2f}" if (*size, kind) in ms else "" for size in sizes]
        lines.append(f"| {kind} | {share:.2f} | {' | '.join([*others, *times])} |")
    first = next(row for row in record["results"] if row["workload"] == "generate")
    text = (
        f"{first['requests']:,} requests of {first['input_len']} + {first['output_len']} tokens, Gemma 2B's shape with "
        f"random weights in bf16, on one {record['machine']['gpu']}; medians of {len(first['runs'])} runs, in which "
        "the kinds alternate. The times are those of the sampling kernels alone, for 256,000 logits a row: of a normal "
        "distribution, or with a few far above it. Over HTTP: the same model and lengths, from "
        f"{http['results'][0]['concurrency']} clients. A small model: {trained['results'][0]['model']} with its own "
        "weights, which makes "
        f"{next(row for row in trained['results'] if row['kind'] == 'temperature')['output_tokens_per_s']:,.0f} tokens "
        "a second with temperature alone, so what a step does on the host weighs more. Records: "
        + ", ".join(f"[{each}](../data/results/{each}.json)" for each in (SAMPLED, SAMPLED_OVER_HTTP))
        + f" and [{SAMPLED_TRAINED}](../data/results/{SAMPLED_TRAINED}.json)."
    )
    return "\n".join([*lines, "", *wrapped(text), ""])


def shape_figures() -> str:
    """The table of other models' shapes, and the peer's run of each workload where it has one."""
    peer = records.read(FP8_PEER)
    theirs = {(row["model"], row["workload"], row["dtype"]): row["output_tokens_per_s"] for row in peer["results"]}
    lines = ["| shape | workload | requests | minillm | vLLM | speedup |", "|---|---|---|---|---|---|"]
    for name, place in SHAPES.items():
        record = records.read(place)
        for row in record["results"]:
            ours, other = (
                row["output_tokens_per_s"],
                theirs.get((f"{row['model']}, random weights", row["workload"], "bfloat16")),
            )
            compared = " | |" if other is None else f"{other:,.0f} | {ours / other:.2f} |"
            lines.append(f"| {name} | {row['workload']} | {row['requests']:,} | {ours:,.0f} | {compared}")
    links = ", ".join(f"[{place}](../data/results/{place}.json)" for place in SHAPES.values())
    text = (
        f"Output tokens per second on one {record['machine']['gpu']}, with random weights in bfloat16 and the settings "
        f"of the table in the README. {_times(len(record['results'][0]['runs']))} after a warm-up. Records: {links}; "
        f"[vLLM](../data/results/{FP8_PEER}.json), on another machine with such a GPU; it has no runs of Gemma 2."
    )
    return "\n".join([*lines, "", *wrapped(text), ""])


def prefill_figures() -> str:
    """The table of attention over prompts: its speed as a share of cuDNN's, by shape and by where the keys are."""
    record = records.read(PREFILL)
    shapes: dict[tuple, dict] = {(row["shape"], row["keys"]): row for row in record["results"]}
    sizes = list(dict.fromkeys((row["prompts"], row["tokens"]) for row in record["results"]))
    cells = {(row["shape"], row["keys"], row["prompts"], row["tokens"]): row for row in record["results"]}
    lines = [
        "| attention of | heads / KV heads, size | keys | "
        + " | ".join(f"{n} x {tokens:,}" for n, tokens in sizes)
        + " |",
        "|---|---|---|" + "---|" * len(sizes),
    ]
    for (shape, keys), row in shapes.items():
        found = [cells[shape, keys, *size] for size in sizes]
        values = " | ".join(f"{each['share_of_cudnn']:.2f} ({each['tflops']:.0f})" for each in found)
        cap = "" if row["soft_cap"] is None else ", soft cap"
        lines.append(f"| {shape}{cap} | {row['heads']} / {row['kv_heads']}, {row['head_dim']} | {keys} | {values} |")
    text = (
        f"The speed as a share of cuDNN's, and in brackets TFLOP/s, for so many prompts of so many tokens in bf16, on "
        f"one {record['machine']['gpu']}. cuDNN reads contiguous keys, without a soft cap. This engine reads the paged "
        "cache, or, as in a prompt's first chunk, the keys that were just computed (new). "
        f"Record: [{PREFILL}](../data/results/{PREFILL}.json)."
    )
    return "\n".join([*lines, "", *wrapped(text), ""])


def speculation_figures() -> str:
    """The table of what drafts gain and cost, where that was measured."""
    if not (records.RESULTS / f"{SPECULATION}.json").exists():
        command = "python tools/speculation_speed.py --record speculation"
        return f"No record yet: `{command}` writes one, on a machine without other work.\n"
    record = records.read(SPECULATION)
    names = {"worst": "no draft is right", "synthetic": "right by a coin"}
    lines = [
        "| traffic | model | requests | acceptance length | speed-up | of all runs |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["results"]:
        name = names.get(row["part"], row.get("task", "stories"))
        right = f", {row['right']:.0%}" if row["part"] == "synthetic" else ""
        length = "" if row["acceptance_length"] is None else f"{row['acceptance_length']:.1f}"
        low, high = min(row["speedups"]), max(row["speedups"])
        lines.append(
            f"| {name}{right} | {row['model']} | {row['requests']} | {length} | {row['speedup']:.2f} | {low:.2f} to "
            f"{high:.2f} |"
        )
    first = record["results"][0]
    machine = record["machine"]
    text = (
        f"With drafts against without, in turns in one process, on {machine['cpu']}; medians of "
        f"{len(first['speedups'])} pairs of runs, other programs ran meanwhile. Named tasks: prompt lookup, greedy, on "
        "chats. No draft is right: how many are tried is the engine's choice. Right by a coin: synthetic acceptance; a "
        "proposer that knows the output drafts for free, and all its drafts run. The acceptance length is that of rows "
        f"of steps that had drafts. Record: [{SPECULATION}](../data/results/{SPECULATION}.json)."
    )
    return "\n".join([*lines, "", *wrapped(text), ""])


def gpu_speculation_figures() -> str:
    """The table of what drafts gain and cost on a GPU, by who drafts, and what `exact` costs."""
    rows, exact = speculating.measured(), records.read(EXACT)["results"]
    lines = [
        "| requests | drafts a step | right | who drafts | acceptance length | speed-up | first run |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        drafts = row.drafts if row.right else f"up to {row.drafts}"
        length = "" if row.length is None else f"{row.length:.1f}"
        lines.append(
            f"| {row.requests} | {drafts} | {row.right:.0%} | {row.who} | {length} | {row.speedup:.2f} | "
            f"{', '.join(f'{each:.2f}' for each in row.earlier)} |"
        )
    record = records.read(speculating.MEASURED["host"])
    longer = {who: statistics.mean(row.longer for row in speculating.by_coin(who, 1)) for who in speculating.MEASURED}
    named = " and ".join(f"[{name}](data/results/{name}.json)" for name in speculating.MEASURED.values())
    text = (
        f"With drafts against without, in turns in one process, on one {record['machine']['gpu']}: Gemma 2B's shape, "
        f"random weights, bfloat16, prompts of 32 tokens, {record['results'][0]['output_tokens']} tokens out, greedy. "
        "Host: the drafts cost nothing, and a step with drafts is launched once the one before it is read. GPU: it "
        "looks the drafts up and counts the right ones, and steps are launched ahead, as by default. Both run in CUDA "
        "graphs. A coin decides which drafts are right, and all run; where none is right (0%), how many are tried is "
        "the engine's choice. Acceptance lengths and speed-ups are those of the second run: the coin of the host falls "
        f"differently each time. For one request, a step with seven drafts took {longer['GPU']:.2f} times as long as "
        f"one without where the GPU drafted, and {longer['host']:.2f} times where the host did, for which the GPU "
        f"waits. Records: {named}."
    )
    times = listed([f"{row['times_as_long']:.2f}" for row in exact])
    counts = listed([str(row["requests"]) for row in exact])
    costs = (
        f"Without drafts, an engine with `exact` takes {times} times as long as one without it, for {counts} requests "
        f"(Gemma 2B's shape with random weights, 128 tokens out). Record: [{EXACT}](data/results/{EXACT}.json)."
    )
    tasks = records.read(TASKS_ON_A_GPU)
    told = ["| task | acceptance length | speed-up | all rounds |", "|---|---|---|---|"]
    for row in tasks["results"]:
        rounds = f"{min(row['speedups']):.2f} to {max(row['speedups']):.2f}"
        told.append(f"| {row['task']} | {row['acceptance_length']:.1f} | {row['speedup']:.2f} | {rounds} |")
    small = (
        f"With a trained model: {tasks['results'][0]['model']}, greedy, one request, whose drafts the GPU looks up. "
        "Without drafts a step of one row is a fused one; with drafts it runs the kernels for any number of rows, "
        "whose launches weigh more the smaller the model is. In bfloat16 the two round differently: "
        f"{sum(not row['same_tokens'] for row in tasks['results'])} of the {len(tasks['results'])} answers differ at "
        "some token from those without drafts, as they may without `exact`. Record: "
        f"[{TASKS_ON_A_GPU}](data/results/{TASKS_ON_A_GPU}.json)."
    )
    return "\n".join([*lines, "", *wrapped(text), "", *told, "", *wrapped(small), "", *wrapped(costs), ""])


def serving_figures() -> str:
    """The table of servers."""
    record = records.read(SERVING)
    alone = {row["precision"]: row for row in record["results"] if row["workload"] == "offline"}
    rows = [row for row in record["results"] if row["workload"] != "offline"]
    peers: dict[int, list[dict]] = {}
    for row in records.read(SERVING_PEER)["results"]:
        if "top_p" not in row["workload"]:
            peers.setdefault(row["clients"], []).append(row)
    lines = [
        "| clients | server | output tokens/s | first token, p50, ms | between tokens, p99, ms |",
        "|---|---|---|---|---|",
    ]
    for clients in sorted({row["concurrency"] for row in rows}):
        for row in (each for each in rows if each["concurrency"] == clients):
            workers = "1 worker" if row["workers"] == 1 else f"{row['workers']} workers"
            name, rate = f"minillm, {row['precision']}, {workers}", row["output_tokens_per_s"]
            times = f"{1e3 * row['ttft_s']['p50']:.1f} | {1e3 * row['itl_s']['p99']:.1f}"
            lines.append(f"| {clients} | {name} | {rate:,.0f} | {times} |")
        best = max(peers[clients], key=lambda each: each["output_tokens_per_s"])
        times = f"{best['ttft_ms_p50']:.1f} | {best['itl_ms_p99']:.1f}"
        lines.append(f"| {clients} | vLLM 0.26, bf16 | {best['output_tokens_per_s']:,.0f} | {times} |")
    tokens = max(row["tokens_per_event"] for row in rows)
    text = (
        f"Gemma 2B's shape with random weights on one {record['machine']['gpu']}: 128 tokens in, 128 out, streamed "
        f"with {tokens:g} token an event to a closed loop of clients in processes of their own. Each row of minillm "
        f"is the median of {len(rows[0]['runs'])} runs, of all requests, the first and the last included. vLLM: the "
        "better of one and four API servers. The same engine without a server generates "
        f"{alone['bf16']['output_tokens_per_s']:,.0f} tokens/s for one request at a time. Records: "
        f"[minillm](data/results/{SERVING}.json), [vLLM](data/results/{SERVING_PEER}.json)."
    )
    return "\n".join([*lines, "", *wrapped(text), ""])


def several_gpus_figures() -> str:
    """The tables of two GPUs: sums by rows, a model that they share and replicas, and what their caches hold."""
    sums = records.read(measured.SUMS)
    found = {(row["rows"], row["hidden"]): row for row in sums["results"]}
    widths = sorted({hidden for _, hidden in found})
    lines = [
        "| rows | " + " | ".join(f"{width:,} numbers: kernels' own, µs | NCCL, µs | ratio" for width in widths) + " |",
        "|---|" + "---|---|---|" * len(widths),
    ]
    for rows in sorted({rows for rows, _ in found}):
        times = [(found[rows, width]["fused_us"], found[rows, width]["nccl_us"]) for width in widths]
        cells = " | ".join(f"{own:.1f} | {nccl:.1f} | {nccl / own:.2f}" for own, nccl in times)
        lines.append(f"| {rows:,} | {cells} |")
    text = (
        f"A sum over two {sums['machine']['gpu']}s of one machine, in bf16, then add and norm: in one launch, or "
        "NCCL's sum and a launch for the rest; the median time of a call in a CUDA graph, on rank 0. "
        f"Record: [{measured.SUMS}](data/results/{measured.SUMS}.json)."
    )
    lines += ["", *wrapped(text), "", "| model | requests | one GPU | divided between two | two replicas |"]
    lines.append("|---|---|---|---|---|")
    for way in measured.ways():
        shared, both = (f"{speed:,.0f} ({speed / way.one:.2f})" for speed in (way.shared, way.replicas))
        lines.append(f"| {way.model} | {way.requests} | {way.one:,.0f} | {shared} | {both} |")
    one, mixed, *_ = records.read(next(iter(measured.WAYS.values())))["results"]
    links = " and ".join(f"[{name}](data/results/{name}.json)" for name in measured.there(measured.WAYS).values())
    text = (
        "Output tokens per second, in brackets as multiples of one GPU's: models' shapes with random weights in bf16; "
        f"one request of {one['input_tokens']} tokens in and {one['output_tokens']} out, or {mixed['requests']} of "
        f"mixed lengths, {mixed['output_tokens']:,} tokens out. Divided: `tensor_parallel_size=2`. Each replica has "
        f"all requests of the row, and the speeds of both are added. {_times(len(one['runs']))} after a warm-up. "
        f"Records: {links}."
    )
    sampled = records.read(SAMPLED_ON_TWO)
    shares = {row["kind"]: row["share"] for row in sampled["results"]}
    text += (
        " GPUs gather all logits to sample: "
        f"{sampled['results'][0]['requests']:,} requests of Gemma 2B's shape on two GPUs keep "
        f"{shares['top_p 0.95']:.0%} of plain temperature's speed with top-p 0.95, "
        f"{shares['presence_penalty 0.5']:.0%} with a penalty and {shares['logprobs 5']:.0%} with five "
        f"log-probabilities. Record: [{SAMPLED_ON_TWO}](data/results/{SAMPLED_ON_TWO}.json)."
    )
    lines += ["", *wrapped(text)]
    if caches := measured.caches():
        lines += ["", "| Gemma 2B's cache | tokens that it holds | output tokens/s |", "|---|---|---|"]
        for each in caches:
            more = f"{each.tokens:,} ({each.tokens / caches[0].tokens:.2f})"
            lines.append(f"| {each.way} | {more} | {each.speed:,.0f} ({each.speed / caches[0].speed:.2f}) |")
        record = records.read(measured.CACHES)
        text = (
            f"{record['results'][0]['requests']:,} requests of mixed lengths, with so little memory that they fill one "
            "GPU's cache. Two GPUs that divide the model store the keys of its only KV head twice, unless "
            "`decode_context_parallel_size=2` divides them too. "
            f"Record: [{measured.CACHES}](data/results/{measured.CACHES}.json)."
        )
        lines += ["", *wrapped(text)]
    return "\n".join([*lines, ""])


def adapter_figures() -> str:
    """The table of what adapters cost."""
    record = records.read(ADAPTERS)
    lines = ["| requests | adapters that they use | time, as a multiple of the base model's |", "|---|---|---|"]
    for row in record["results"]:
        costs = [1 + each for each in row["costs"]]
        times = f"{1 + row['cost']:.2f} ({min(costs):.2f} to {max(costs):.2f})"
        lines.append(f"| {row['requests']} | {row['used'] or 'none'} | {times} |")
    first, gpu = record["results"][0], record["machine"]["gpu"]
    text = (
        f"Gemma 2B's shape with random weights in bf16 on one {gpu}, {first['input_tokens']} tokens in and "
        f"{first['output_tokens']} out: an engine with {first['loaded']} adapters loaded, of rank {first['rank']} on "
        "all projections, in turns with one that has none; medians, and in brackets all "
        f"{len(first['costs'])} pairs. Record: [{ADAPTERS}](data/results/{ADAPTERS}.json)."
    )
    return "\n".join([*lines, "", *wrapped(text), ""])


def _times(runs: int) -> str:
    return "Each was timed once" if runs == 1 else f"Medians of {runs} runs"


def busy_figures() -> str:
    """The tables of decode steps while other programs keep cores busy."""
    lines = []
    for name in BUSY:
        record = records.read(name)
        loads = sorted({row["busy_processes"] for row in record["results"]})
        lines += [f"| {record['machine']['cores']} cores, busy processes | {' | '.join(map(str, loads))} |"]
        lines += ["|---" * (len(loads) + 1) + "|"]
        for requests in sorted({row["requests"] for row in record["results"]}):
            for threads, words in (("chosen", "chosen"), ("one", "one"), ("all", f"{record['all_threads']}")):
                rows = [
                    each for each in record["results"] if (each["requests"], each["threads"]) == (requests, threads)
                ]
                times = {row["busy_processes"]: row["step_ms"] for row in rows}
                at_once = "1 request" if requests == 1 else f"{requests} requests"
                cells = " | ".join(plots.short(times[load]) for load in loads)
                lines.append(f"| {at_once}, threads: {words} | {cells} |")
        lines.append("")
    links = ", ".join(f"[{records.read(name)['machine']['cores']} cores](data/results/{name}.json)" for name in BUSY)
    runs = sorted({len(records.read(name)["results"][0]["runs"]) for name in BUSY})
    text = (
        "Milliseconds of a decode step of `tiny-gemma` on a CPU, while that many other processes never wait; medians "
        f"of {' or '.join(map(str, runs))} alternating runs. Records: {links}."
    )
    return "\n".join([*lines, *wrapped(text), ""])


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)


def batching_records() -> dict[str, dict]:
    """The existing records of `minillm bench batching`, by name."""
    return {name: records.read(name) for name in BATCHING if (records.RESULTS / f"{name}.json").is_file()}


def p99(row: dict, name: str) -> str:
    """The median of a latency's 99th percentiles, and their spread over the runs, in ms."""
    low, high = (plots.short(1e3 * edge(run[name]["p99"] for run in row["runs"])) for edge in (min, max))
    return f"{plots.short(row[name]['p99'] * 1e3)} ({low} to {high})"


def batching_figures() -> str:
    """The tables of batching and of memory."""
    found = batching_records()
    parts = [
        {part: batching.of(record, part) for part in batching.PARTS} | {"settings": record} for record in found.values()
    ]

    def speed(part):
        static, ours = (row["output_tokens_per_s"] for row in part["throughput"])
        return f"{static:,.0f} -> {ours:,.0f} ({part['throughput'][1]['times_static']:.2f}x)"

    def latency(part, name):
        chunked, whole = part["latency"]
        return f"{p99(whole, name)} -> {p99(chunked, name)} ms"

    def at_once(part):
        row = part["throughput"][0]
        lengths = "full lengths" if row["scale"] == 1 else f"lengths divided by {row['scale']}"
        return f"{row['requests']} in {part['settings']['rows']} rows, {lengths}"

    def arriving(part):
        chunked, speed = part["latency"][0], part["settings"]["speed"]
        played = "as in the trace" if speed == 1 else f"{speed:g} times as fast as in the trace"
        return f"{chunked['requests']}, {chunked['requests_per_s']:g} per second, {played}; {chunked['budget']} tokens"

    def saved(part, traffic):
        row = next(row for row in part["prefix"] if row["traffic"] == traffic)
        return f"{row['computed_without']:,} -> {row['computed_with']:,} ({row['saved']:.0%} saved)"

    rows = {
        "*requests at once*": at_once,
        "output tokens/s, static batches -> in-flight": speed,
        "*arriving requests; chunk size*": arriving,
        "time to first token, p99, whole prompts -> chunks": lambda part: latency(part, "ttft_s"),
        "time between tokens, p99, whole prompts -> chunks": lambda part: latency(part, "itl_s"),
        "prefill tokens, shared system prompts": lambda part: saved(part, "trace"),
        "prefill tokens, conversations of 4 turns": lambda part: saved(part, "conversations"),
        "prefill tokens, 64 requests at once with 512 tokens in common": lambda part: saved(part, "at once"),
    }
    heads = [
        f"{records.model_of(record)}, {record['dtype']}, {record['machine']['gpu'] or 'CPU'}"
        for record in found.values()
    ]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    lines += [f"| {name} | {' | '.join(map(cell, parts))} |" for name, cell in rows.items()]
    memory = parts[0]["memory"]
    lines += ["", "| cache | used | reserved | never used | free | concurrent requests |", "|---|---|---|---|---|---|"]
    for row in memory:
        shares = " | ".join(f"{row[name]:.1%}" for name in waste.SHARES)
        lines.append(f"| {row['cache']} | {shares} | {row['running']:.0f} |")
    named = ", ".join(f"[{name}](data/results/{name}.json)" for name in found)
    runs = " and ".join(dict.fromkeys(str(len(part["latency"][0]["runs"])) for part in parts))
    traffic, slots, most = next(iter(found.values()))["traffic"], memory[0]["slots"], memory[0]["max_model_len"]
    return "\n".join(
        [
            *lines,
            "",
            f"On the traffic trace `data/traces/{traffic}.jsonl`; speeds and latencies are medians of alternating runs",
            f"in one process, latencies with the minimum and maximum of {runs} runs. Memory: {slots:,} tokens, the",
            f"longest possible request {most:,}; the engine's scheduler without a model, averaged over the steps in",
            "which requests waited; this reproduces figure 2 of the PagedAttention paper (Kwon et al. 2023).",
            f"Settings and all runs are in the records: {named}. `minillm bench batching` measures your machine.",
            "",
        ]
    )


FIGURES = {  # by the names of their blocks in the pages
    "batching": batching_figures,
    "GPU figures": gpu_figures,
    "quantization": quantization_figures,
    "real model": real_figures,
    "real model in short": real_in_short,
    "fp8": fp8_figures,
    "cache": cache_figures,
    "sampled": sampled_figures,
    "prefill": prefill_figures,
    "other shapes": shape_figures,
    "speculation": speculation_figures,
    "speculation on a GPU": gpu_speculation_figures,
    "serving": serving_figures,
    "several GPUs": several_gpus_figures,
    "adapters": adapter_figures,
    "busy": busy_figures,
    "figures": figures,
}


def filled(page: Path) -> str:
    """A page with its figures filled in and their links relative to the page."""
    up = "../" * len(page.relative_to(ROOT).parents[:-1])
    text = page.read_text(encoding="utf-8")
    for name, written in FIGURES.items():
        block = re.compile(f"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        new = written().replace("](data/results/", f"]({up}data/results/")
        text = block.sub(lambda found, new=new: found[1] + new + found[2], text)
    return text


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # Without a salt, or with a date, drawing the same record twice would give two different files.
    matplotlib.rcParams["svg.hashsalt"] = "minillm"
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), width_ratios=(1.7, 0.6, 1.4), layout="constrained")
    timeline(records.read(TIMELINE), axes[0])
    for axis, (ours, _) in zip(axes[1:], pairs(), strict=True):
        plots.throughput(records.read(OFFLINE), ours["workload"], axis)
        axis.set_title("one request" if ours["requests"] == 1 else f"{ours['requests']} requests of mixed lengths")
        axis.tick_params(axis="x", labelsize=8)
        axis.title.set_fontsize(10)
    figure.savefig(PICTURE, metadata={"Date": None}, facecolor="white")
    found = list(batching_records().values())
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), width_ratios=(1.5, 0.7, 1.3), layout="constrained")
    plots.memory(found[0], axes[0])
    plots.batching(found[-1], axes[1])
    plots.chunking(found[-1], axes[2])
    figure.savefig(BATCHING_PICTURE, metadata={"Date": None}, facecolor="white")
    figure, axes = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    plots.losses(records.read(LOSSES), axes[0])
    plots.precisions(records.read(QUANTIZATION), axes[1])
    figure.savefig(QUANTIZATION_PICTURE, metadata={"Date": None}, facecolor="white")


def timeline(record: dict, axis) -> None:
    """A bar for each request: from submission to first token, and on to the last token."""
    spans = sorted(record["results"], key=lambda each: each["first_token_s"])
    for place, each in enumerate(spans):
        first, last = each["first_token_s"], each["finish_s"]
        axis.barh(place, first, color="#e0e0e0", label="waits" if place == 0 else None)
        axis.barh(place, last - first, left=first, color=plots.OURS, label="generates" if place == 0 else None)
    axis.set(xlabel="seconds", ylabel="requests, in the order they start", yticks=[])
    places = f"{len(spans)} requests share {record['rows']} places: as one leaves, the next joins"
    axis.set_title(places, fontsize=10)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper right")


def main() -> None:
    if sys.argv[1:] == ["record"]:
        measure()
    elif sys.argv[1:]:
        sys.exit(__doc__)
    draw()
    for page in PAGES:
        page.write_text(filled(page), encoding="utf-8")


if __name__ == "__main__":
    main()
