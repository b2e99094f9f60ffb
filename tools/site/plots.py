"""The pages of records: a few plots for each device, from `data/results/`."""

from collections.abc import Callable

from minillm.bench import records

from .figures import COLORS, Figure, axis, bars, categories, dots, figure, line

TOKENS_PER_S = "output tokens per second"
MEMORY = {"used": "tokens", "reserved": "reserved", "internal": "never used", "external": "free"}
SIDE_BY_SIDE = {"scattermode": "group", "scattergap": 0.5}  # points of one category
HEAD = """<script src="../_static/plotly.min.js"></script>
<script src="../_static/plots.js"></script>"""


def page(device: str) -> str:
    """A device's page in Markdown. Raises KeyError for a device that has none."""
    title, introduction, figures = DEVICES[device]
    parts = [f"# {title}", introduction, f"```{{raw}} html\n{HEAD}\n```", *(make().page() for make in figures)]
    return "\n\n".join(parts)


def _results(name: str, /, **wanted: object) -> list[dict]:
    """A record's results that have these values."""
    return [row for row in records.read(name)["results"] if all(row.get(key) == wanted[key] for key in wanted)]


def _speeds(name: str, /, **wanted: object) -> dict[str, float]:
    """The best output tokens per second of each workload among the results that have these values."""
    best: dict[str, float] = {}
    for row in _results(name, **wanted):
        best[row["workload"]] = max(row["output_tokens_per_s"], best.get(row["workload"], 0))
    return best


def _by_workload(named: dict[str, dict[str, float]], drawn: Callable[..., dict] = dots) -> list[dict]:
    """A trace for each engine or setting; the first decides which workloads are shown, in which order."""
    workloads = list(next(iter(named.values())))
    labels = [name.replace("_", "<br>") for name in workloads]
    return [drawn(name, labels, [speeds.get(each) for each in workloads]) for name, speeds in named.items()]


def with_vllm() -> Figure:
    names = ["h200/gemma-2b-bf16", "h200/vllm-h200"]
    shown = {"minillm": _speeds(names[0]), "vLLM 0.26": _speeds(names[1], dtype="bf16")}
    return figure(
        "Compared with vLLM, bfloat16",
        "Output tokens per second for six workloads, all requests submitted at once. A workload's name gives its input "
        "and output lengths and the number of requests. Select a point to read its value.",
        names,
        _by_workload(shown),
        categories("workload"),
        axis(TOKENS_PER_S, log=True),
        **SIDE_BY_SIDE,
    )


def with_vllm_in_fp8() -> Figure:
    names = [
        "h200/gemma-2b-bf16",
        "h200/gemma-2b-fp8",
        "h200/gemma-2b-fp8-cache",
        "h200/vllm-h200",
        "h200/vllm-fp8kv-and-families-h200",
    ]
    peer, cached = _speeds(names[3], dtype="fp8"), _speeds(names[4], dtype="fp8", model="gemma-2b, random weights")
    shown = {
        "minillm, bf16": _speeds(names[0]),
        "minillm, FP8 weights": _speeds(names[1]),
        "minillm, FP8 weights and cache": _speeds(names[2]),
        "vLLM, FP8": {each: max(peer.get(each, 0), cached.get(each, 0)) for each in peer | cached},
    }
    return figure(
        "With FP8 weights",
        "What FP8 weights, and an FP8 cache with them, add to bfloat16 in the same workloads. vLLM's point is the "
        "better of its runs with either cache.",
        names,
        _by_workload(shown),
        categories("workload"),
        axis(TOKENS_PER_S, log=True),
        **SIDE_BY_SIDE,
    )


def over_http() -> Figure:
    names = ["h200/serving", "h200/vllm-server-h200"]
    series = {
        f"minillm, {precision}, {workers} {'worker' if workers == 1 else 'workers'}": _results(
            names[0], precision=precision, workers=workers
        )
        for precision, workers in (("bf16", 1), ("bf16", 4), ("fp8", 4))
    }
    traces = [
        line(name, [row["concurrency"] for row in rows], [row["output_tokens_per_s"] for row in rows])
        for name, rows in series.items()
    ]
    for servers in (1, 4):
        rows = _results(names[1], http=f"api-server-count {servers}", workload="128 in, 128 out, streamed, closed loop")
        name = f"vLLM, bf16, {servers} API {'server' if servers == 1 else 'servers'}"
        traces.append(
            line(
                name,
                [row["clients"] for row in rows],
                [row["output_tokens_per_s"] for row in rows],
                line={"dash": "dot"},
            )
        )
    return figure(
        "Over HTTP",
        "Output tokens per second when each client sends its next request as soon as the last answer ends: 128 tokens "
        "in, 128 out, streamed. Several workers share the work of sending events.",
        names,
        traces,
        axis("clients at once", log=True),
        axis(TOKENS_PER_S, log=True),
    )


def quantized_speed() -> Figure:
    name = "h200/quantization"
    rows = sorted((row for row in _results(name) if row["quantization"] != "bf16"), key=lambda row: row["requests"])
    formats = {row["quantization"]: row["weight_bytes"] for row in sorted(rows, key=lambda row: row["quantization"])}
    plain = list(dict.fromkeys(each.split(", head")[0].split(" (")[0] for each in formats))  # a color for each
    traces = []
    for each, size in formats.items():
        mine = [row for row in rows if row["quantization"] == each]
        style = {
            "color": COLORS[plain.index(each.split(", head")[0].split(" (")[0])],
            "dash": "dot" if "head" in each else "solid",
        }
        x, y = [row["requests"] for row in mine], [row["times_bf16"] for row in mine]
        traces.append(line(f"{each}: {size / 1e9:.1f} GB", x, y, line=style))
    return figure(
        "Quantized weights: which is fast for how many requests",
        "Speed as a multiple of bfloat16's in the same run. Few requests gain from smaller weights; many requests gain "
        "only from products of 8-bit numbers. Dotted: the head is quantized, too. Select a name to hide its line.",
        [name],
        traces,
        axis("requests", log=True),
        axis("speed / bfloat16's speed"),
        height=620,
    )


def cache_in_8_bits() -> Figure:
    name = "h200/cache-speed"
    traces = []
    for kind in ("int8", "fp8"):
        for requests in (1, 16, 64, 512):
            rows = _results(name, kernel="decode_attention", kv_cache_dtype=kind, requests=requests)
            label = f"{kind}, {requests} {'request' if requests == 1 else 'requests'}"
            x, y = [row["tokens"] for row in rows], [row["times_bf16"] for row in rows]
            traces.append(line(label, x, y, line={"dash": "solid" if kind == "int8" else "dot"}))
    return figure(
        "Attention over a cache in 8 bits",
        "Decode attention's speed as a multiple of its speed over a bfloat16 cache. Codes of half the bytes pay off "
        "when a step reads many keys: many requests, or long ones.",
        [name],
        traces,
        axis("tokens in each request's cache", log=True),
        axis("speed / bfloat16 cache's speed"),
        height=520,
    )


def kernels() -> Figure:
    name = "h200/kernels"
    rows = _results(name)
    traces = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == kernel]
        hover = [f"{row['shape']}: {1e3 * row['ms']:.1f} µs, torch {1e3 * row['reference_ms']:.1f} µs" for row in mine]
        speedup = [row["reference_ms"] / row["ms"] for row in mine]
        drawn = dots if kernel == "prefill_attention" else line  # its rows are prompts of different lengths
        traces.append(drawn(kernel, [row["rows"] for row in mine], speedup, text=hover))
    return figure(
        "Triton kernels compared with plain torch",
        "The time of the plain torch operation divided by the kernel's, in bfloat16. The torch operation is the "
        "specification that tests compare the kernel with, not the fastest torch code.",
        [name],
        traces,
        axis("rows (tokens)", log=True),
        axis("time of torch / time of the kernel", log=True),
        height=520,
    )


def roofline() -> Figure:
    name = "h200/roofline"
    record = records.read(name)
    rows = [row for row in record["results"] if row["name"].startswith("decode")]
    requests = [row["tokens"] for row in rows]
    return figure(
        "How close a decode step comes to the hardware's limits",
        "A step of decodes has to read its bytes and to do its operations; both lines use the rates that this GPU "
        "reaches. A step takes at least as long as the higher line.",
        [name],
        [
            line("measured step", requests, [1e3 * row["seconds"] for row in rows]),
            line("reading the bytes", requests, [1e3 * row["bytes"] / record["bytes_per_s"] for row in rows]),
            line("operations", requests, [1e3 * row["operations"] / record["operations_per_s"] for row in rows]),
        ],
        axis("requests in the step", log=True),
        axis("milliseconds", log=True),
    )


def graphs() -> Figure:
    name = "h200/ablation"
    rows = _results(name, group="CUDA graphs")
    settings = list(dict.fromkeys(row["name"] for row in rows))
    shown = {f"CUDA graphs {each}": _speeds(name, group="CUDA graphs", name=each) for each in reversed(settings)}
    return figure(
        "What CUDA graphs contribute",
        "The same workloads without CUDA graphs, with graphs for steps of decodes only, and with graphs for all steps "
        "that fit one.",
        [name],
        _by_workload(shown),
        categories("workload"),
        axis(TOKENS_PER_S, log=True),
        **SIDE_BY_SIDE,
    )


def batching(device: str) -> Callable[[], Figure]:
    """Static batches and in-flight batching, as a function for the page."""

    def made() -> Figure:
        name = f"{device}/batching"
        rows = _results(name, part="throughput")
        return figure(
            "In-flight batching",
            f"{rows[0]['requests']} requests of a traffic trace, in {records.read(name)['rows']} rows. A static batch "
            "runs until its longest answer ends; in-flight batching gives a free row to the next request at once.",
            [name],
            [bars("", [row["batching"] for row in rows], [row["output_tokens_per_s"] for row in rows])],
            categories("batching"),
            axis(TOKENS_PER_S),
            showlegend=False,
            bargap=0.6,
        )

    return made


def chunks(device: str) -> Callable[[], Figure]:
    """Latencies with whole prompts and with chunks, as a function for the page."""

    def made() -> Figure:
        name = f"{device}/batching"
        labels = [f"{what},<br>{p}" for what in ("first<br>token", "between<br>tokens") for p in ("p50", "p99")]
        traces = []
        for row in _results(name, part="latency"):
            values = [1e3 * row[what][p] for what in ("ttft_s", "itl_s") for p in ("p50", "p99")]
            traces.append(dots(f"{row['prefill']} prompts, at most {row['budget']:,} tokens in a step", labels, values))
        return figure(
            "Chunked prompts",
            "Requests arrive as in a traffic trace. A long prompt in one step delays everyone's next token; in chunks, "
            "it delays them less, and prompts that wait for their turn may start later.",
            [name],
            traces,
            categories("latency"),
            axis("milliseconds", log=True),
            **SIDE_BY_SIDE,
        )

    return made


def prefixes(device: str) -> Callable[[], Figure]:
    """Prompt tokens computed with and without shared prefixes, as a function for the page."""

    def made() -> Figure:
        name = f"{device}/batching"
        rows = _results(name, part="prefix")
        names = {
            "trace": "shared<br>system prompts",
            "conversations": "conversations",
            "at once": "submitted<br>at once",
        }
        labels = [names[row["traffic"]] for row in rows]
        return figure(
            "Shared prefixes",
            "Prompt tokens that the engine computes, with and without blocks shared between prompts that begin alike.",
            [name],
            [
                bars("without sharing", labels, [row["computed_without"] for row in rows]),
                bars("with sharing", labels, [row["computed_with"] for row in rows]),
            ],
            categories("traffic"),
            axis("prompt tokens computed"),
        )

    return made


def memory() -> Figure:
    name = "cpu/batching"
    rows = _results(name, part="memory")
    labels = [row["cache"].replace(": ", ":<br>").replace(", ", ",<br>") for row in rows]
    traces = [bars(label, [100 * row[key] for row in rows], labels, orientation="h") for key, label in MEMORY.items()]
    return figure(
        "How the cache's memory is used",
        "Average shares of a cache of 16,384 tokens while requests wait. Contiguous memory has to be reserved for the "
        "longest answer; blocks are allocated as tokens come.",
        [name],
        traces,
        axis("percent of the cache", range=[0, 100]),
        axis("", autorange="reversed"),
        barmode="stack",
    )


def with_transformers() -> Figure:
    name = "cpu/offline"
    shown = {"minillm": _speeds(name, engine="minillm"), "transformers": _speeds(name, engine="transformers")}
    return figure(
        "Compared with transformers",
        "Output tokens per second of tiny-gemma in float32; transformers with its best static batch size. The second "
        "workload has 64 requests, with lengths divided by 8.",
        [name],
        _by_workload(shown, bars),
        categories("workload"),
        axis(TOKENS_PER_S),
    )


def knee() -> Figure:
    name = "cpu/open-loop"
    record = records.read(name)
    rows = record["results"]
    rates = [row["rate"] for row in rows]
    most = record["closed_requests_per_s"]
    return figure(
        "Open loop: the knee",
        f"Requests arrive at random times whether or not earlier ones are done. Up to about {most:.0f} per second, the "
        "rate that the same server reaches in a closed loop, first tokens come soon; beyond it, the queue grows.",
        [name],
        [line(f"time to first token, {p}", rates, [1e3 * row["ttft_s"][p] for row in rows]) for p in ("p50", "p99")]
        + [line(f"between tokens, {p}", rates, [1e3 * row["itl_s"][p] for row in rows]) for p in ("p50", "p99")],
        axis("requests arriving per second"),
        axis("milliseconds", log=True),
        shapes=[
            {
                "type": "line",
                "x0": most,
                "x1": most,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"dash": "dot", "color": "#8c8c8c"},
            }
        ],
    )


def quantization_loss() -> Figure:
    name = "cpu/quantization"
    rows = [row for row in _results(name) if row["kl"] > 0]
    traces = []
    for simulated, label in ((False, "runs in the format"), (True, "simulated: shows the loss only")):
        mine = [row for row in rows if row["simulated"] == simulated]
        trace = line(label, [row["bytes"] / 1e6 for row in mine], [row["kl"] for row in mine])
        text = [row["quantization"] for row in mine]
        hover = [
            f"{row['quantization']}: {row['bytes'] / 1e6:.1f} MB, divergence {row['kl']:.2g}, accuracy lost "
            f"{row['loss_points']:.1f} points ({row['loss_interval'][0]:.1f} to {row['loss_interval'][1]:.1f})"
            for row in mine
        ]
        traces.append(
            trace | {"mode": "markers", "hovertext": hover, "hoverinfo": "text", "text": text, "marker": {"size": 10}}
        )
    return figure(
        "Quantization: size and loss",
        "Each method's size and how far its predictions are from the unquantized model's, for the trained tiny-gemma. "
        "Lower and further left is better. Select a point for its name and the accuracy that it loses, with a 95% "
        "interval.",
        [name],
        traces,
        axis("size of the weights, MB"),
        axis("Kullback-Leibler divergence, nats per token", log=True),
    )


def triton_server() -> Figure:
    name = "cpu/triton"
    rows = _results(name)
    return figure(
        "Inside Triton Inference Server",
        "Eight rows, one long answer in four. Triton's dynamic batching waits for the longest answer of a batch.",
        [name],
        [
            bars(
                "", [row["engine"].replace(", ", ",<br>") for row in rows], [row["output_tokens_per_s"] for row in rows]
            )
        ],
        categories("server"),
        axis(TOKENS_PER_S),
        showlegend=False,
        bargap=0.5,
    )


def timeline() -> Figure:
    name = "cpu/timeline"
    rows = _results(name)
    places = list(range(1, len(rows) + 1))
    first, last = [row["first_token_s"] for row in rows], [row["finish_s"] for row in rows]
    spans = [end - begin for begin, end in zip(first, last, strict=True)]
    return figure(
        "Requests in a batch over time",
        f"{len(rows)} requests submitted at once, {records.read(name)['rows']} rows. A bar goes from a request's first "
        "token to its last. When one ends, the next one starts in its row.",
        [name],
        [bars("", spans, places, base=first, orientation="h")],
        axis("seconds"),
        axis("request", autorange="reversed"),
        showlegend=False,
    )


DEVICES: dict[str, tuple[str, str, list[Callable[[], Figure]]]] = {
    "h200": (
        "Records: NVIDIA H200",
        "Gemma 2B's shape with random weights, unless a plot says otherwise. The page with the "
        "[tables](../docs/measurements.md) has the settings of each comparison.",
        [
            with_vllm,
            with_vllm_in_fp8,
            over_http,
            quantized_speed,
            batching("h200"),
            chunks("h200"),
            prefixes("h200"),
            roofline,
            kernels,
            cache_in_8_bits,
            graphs,
        ],
    ),
    "cpu": (
        "Records: a CPU with two cores",
        "The embedded model, tiny-gemma, in float32. The page with the [tables](../docs/measurements.md) has the "
        "settings of each comparison.",
        [
            with_transformers,
            timeline,
            batching("cpu"),
            chunks("cpu"),
            memory,
            prefixes("cpu"),
            knee,
            quantization_loss,
            triton_server,
        ],
    ),
}
