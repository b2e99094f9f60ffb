"""`minillm bench`: measure the engine."""

import json
import math
from contextlib import suppress
from typing import Annotated, Any, Unpack

import typer

from minillm.bench.serve_bench import ServeBench
from minillm.config import EngineOptions
from minillm.errors import ConfigError
from minillm.from_vllm.command_line import BenchServe, Group

from .options import JsonPath, Model, with_engine_options, with_options

# The defaults of options that can be repeated.
OFFLINE = ["single", "mixed"]
ABLATED = ["single", "chat"]
BATCHES = [1, 8, 64, 256]
PROMPTS = [400, 1600]
URLS = ["http://127.0.0.1:8000"]

bench_app = typer.Typer(cls=Group, help="Measure the engine on the project's workloads.", no_args_is_help=True)


def _counts(option: str, text: str) -> list[int]:
    """Return the whole numbers of "1,2,4". Raises ConfigError."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers with commas between them, as 1,2,4: not {text!r}") from None


@bench_app.command()
@with_engine_options
def offline(
    model: Model = None,
    workload: Annotated[list[str], typer.Option(help="A workload's name or its first word; repeatable.")] = OFFLINE,
    scale: Annotated[int, typer.Option(help="Divide all lengths by this.")] = 1,
    requests: Annotated[int | None, typer.Option(help="Only the first this many requests.")] = None,
    repeat: Annotated[int, typer.Option(help="Timed runs each, after one that warms up.")] = 3,
    compare: Annotated[
        list[str] | None, typer.Option(help="Also measure this engine: transformers, ctranslate2; repeatable.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 1.0,
    threads: Annotated[int | None, typer.Option(help="CPU threads, for every engine measured.")] = None,
    json_path: JsonPath = None,
    **engine_options: Any,
) -> None:
    """Run all requests at once, without a server; print a table and, last, the record as one line of JSON."""
    from minillm.bench import offline

    offline.run(
        model,
        workload=workload,
        scale=scale,
        requests=requests,
        repeat=repeat,
        compare=compare or (),
        temperature=temperature,
        threads=threads,
        json_path=json_path,
        **engine_options,
    )


@bench_app.command("serve", cls=BenchServe)
@with_options(ServeBench)
def bench_serve(
    url: Annotated[list[str], typer.Option(help="A server, without /v1; repeatable: the same loads for each.")] = URLS,
    served_model_name: Annotated[str | None, typer.Option(hidden=True)] = None,  # vLLM's, where --model may be a path
    **settings: Any,
) -> None:
    """Load a running server; prints rates and latencies and, last, the record as one line of JSON.

    --concurrency 16, or --sweep 1,4,16, or --rate 4, or --trace conversation --speed 2
    """
    from minillm.bench import figures, serve

    for name in ("sweep", "input_len", "output_len"):
        if name in settings:
            settings[name] = _counts(f"--{name.replace('_', '-')}", settings[name])
    if "slo" in settings:
        settings["slo"] = figures.parse_slo(settings["slo"])
    if "sampling" in settings:
        given = settings["sampling"]
        with suppress(ValueError):
            settings["sampling"] = json.loads(given)
        if not isinstance(settings["sampling"], dict):
            raise ConfigError(f'--sampling takes a JSON object of fields, such as {{"top_p": 0.95}}, not {given!r}')
    if settings.get("rate") == math.inf:
        del settings["rate"]
    serve.run(url, **settings | ({"model": served_model_name} if served_model_name else {}))


@bench_app.command()
@with_engine_options
def roofline(
    model: Model = None,
    batch: Annotated[list[int], typer.Option(help="Decode steps with this many requests; repeatable.")] = BATCHES,
    prompt: Annotated[list[int], typer.Option(help="Prefill steps of so many tokens; repeatable.")] = PROMPTS,
    workload: Annotated[
        list[str] | None, typer.Option(help="Measure this workload instead of single steps; repeatable.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Only a workload's first this many requests.")] = None,
    scale: Annotated[int, typer.Option(help="Divide a workload's lengths by this.")] = 1,
    repeat: Annotated[int, typer.Option(help="Timed runs of a workload, after one that warms up.")] = 1,
    json_path: JsonPath = None,
    **engine_options: Unpack[EngineOptions],
) -> None:
    """Measure what this machine can do at most, how close the engine's steps get, and where the time goes.

    Without --workload: single steps. With it: a workload's floor, its rate, and on a GPU the shares of its time.
    """
    from minillm.bench import breakdown, roofline

    if workload:
        breakdown.run(
            model,
            workload=workload,
            requests=requests,
            scale=scale,
            repeat=repeat,
            json_path=json_path,
            **engine_options,
        )
        return
    roofline.run(model, batches=batch, prompts=prompt, json_path=json_path, **engine_options)


@bench_app.command()
@with_engine_options
def ablation(
    model: Model = None,
    workload: Annotated[list[str], typer.Option(help="A workload's name or its first word; repeatable.")] = ABLATED,
    requests: Annotated[
        int | None, typer.Option(help="Only the first this many requests.  [default: 256, on a CPU 16]")
    ] = None,
    scale: Annotated[int, typer.Option(help="Divide all lengths by this.")] = 1,
    repeat: Annotated[int, typer.Option(help="Timed runs of a setting, after one that warms up.")] = 3,
    json_path: JsonPath = None,
    **engine_options: Unpack[EngineOptions],
) -> None:
    """Measure what each part is worth by removing it: CUDA graphs, sampling in them, run-ahead, attention, fusion."""
    from minillm.bench import ablation

    ablation.run(
        model,
        workload=workload,
        requests=requests,
        scale=scale,
        repeat=repeat,
        json_path=json_path,
        **engine_options,
    )


@bench_app.command()
@with_engine_options
def batching(
    model: Model = None,
    traffic: Annotated[str, typer.Option(help="A traffic trace: a committed one's name, or a file.")] = "conversation",
    rows: Annotated[int | None, typer.Option(help="Most requests in a step.")] = None,
    scale: Annotated[int | None, typer.Option(help="Divide lengths by this where all requests arrive at once.")] = None,
    speed: Annotated[
        float | None, typer.Option(help="Replay the trace this many times as fast for the latencies.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens in a step of the chunked latencies.")] = None,
    arriving: Annotated[int | None, typer.Option(help="How many requests of the trace to replay.")] = None,
    repeat: Annotated[int, typer.Option(help="Timed runs of each setting, interleaved.")] = 3,
    json_path: JsonPath = None,
    **engine_options: Unpack[EngineOptions],
) -> None:
    """Measure what in-flight batching, chunked prefill, prefix reuse and paging gain on a traffic trace.

    Rows, scale, speed, chunk and arrivals are chosen to suit the device unless they are given.
    """
    from minillm.bench import batching

    batching.run(
        model,
        traffic=traffic,
        rows=rows,
        scale=scale,
        speed=speed,
        chunk=chunk,
        arriving=arriving,
        repeat=repeat,
        json_path=json_path,
        **engine_options,
    )
