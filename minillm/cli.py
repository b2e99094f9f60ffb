"""The command `minillm`. Every command imports what it needs when it runs: `minillm --help` never waits for torch."""

import functools
import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, fields
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from minillm import __version__
from minillm.config import EngineConfig, EngineOptions
from minillm.errors import ConfigError, MinillmError
from minillm.server.limits import Timeouts

if TYPE_CHECKING:  # the commands import them when they run
    from minillm import LLM, SamplingParams
    from minillm.request import Prompt

TIMEOUTS = Timeouts()
# The defaults of options that can be repeated.
OFFLINE = ["single", "mixed"]
ABLATED = ["single", "chat"]
BATCHES = [1, 8, 64, 256]
PROMPTS = [400, 1600]

app = typer.Typer(
    name="minillm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(help="Measure the engine on the project's workloads.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A model's directory, or gemma-2b with --load-format dummy. Default: the embedded tiny-gemma.",
        show_default=False,
    ),
]
JsonPath = Annotated[
    Path | None,
    typer.Option("--json", help="Write the record into this file too; a name without .json: into data/results/."),
]


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """An LLM inference engine to learn from and to use. Start with: minillm doctor"""


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Print an error that the user can fix as one line and exit with status 2; a bug keeps its traceback."""
    try:
        yield
    except (MinillmError, ConnectionError, ModuleNotFoundError) as error:
        message = str(error)
        if isinstance(error, ModuleNotFoundError):
            message += ". `minillm doctor` says what is missing and how to install it"
        print(f"minillm: {message}", file=sys.stderr)
        raise typer.Exit(2) from None


def show_logs(level: str = "warning") -> None:
    """Write minillm's log to the terminal: what a command reports to stdout, warnings from `level` on to stderr."""
    log = logging.getLogger("minillm")
    log.setLevel(logging.INFO)
    reports = logging.StreamHandler(sys.stdout)
    reports.addFilter(lambda record: record.levelno < logging.WARNING)
    warnings = logging.StreamHandler(sys.stderr)
    warnings.setFormatter(logging.Formatter("minillm: %(message)s"))
    warnings.setLevel(max(logging.WARNING, logging.getLevelNamesMapping().get(level.upper(), logging.WARNING)))
    log.handlers = [reports, warnings]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _engine_parameter(field: Field) -> inspect.Parameter:
    shown = field.default is not None and not isinstance(field.default, bool)
    option = typer.Option(help=_sentence(field.metadata["help"]), show_default=shown)
    kind = getitem(Annotated, (field.type, option))
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=kind)


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of `EngineConfig`; it gets those that were set as keywords."""
    own = inspect.signature(command)
    kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    parameters = [*kept, *map(_engine_parameter, fields(EngineConfig))]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        unset = [name for name, default in defaults.items() if values[name] == default]
        with friendly_errors():
            command(**{name: value for name, value in values.items() if name not in unset})

    vars(run)["__signature__"] = own.replace(parameters=parameters)  # what typer makes the options from
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


@app.command()
@with_engine_options
def generate(
    prompts: Annotated[list[str], typer.Argument(help="One completion is printed for each.")],
    model: Model = None,
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user's turn in a chat.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it is generated.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens (0: all).")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens whose probabilities sum to p.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End the text at this string; repeatable.")] = None,
    **engine_options: Unpack[EngineOptions],
) -> None:
    """Continue prompts, or answer them with --chat.

    minillm generate "The lighthouse of" --max-tokens 40
    """
    from minillm import LLM, SamplingParams
    from minillm.engine.llm import chat_prompt

    # --seed is the engine's, and seeds every request that names no seed of its own.
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop=stop or ())
    with LLM(model, **engine_options) as llm:
        each: list[Prompt] = [*prompts]
        if chat:
            each = [chat_prompt(llm.tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
        if stream:
            _print_stream(llm, each, params)
            return
        for completion in llm.generate(each, params):
            print(completion.text)


def _print_stream(llm: "LLM", prompts: "list[Prompt]", params: "SamplingParams") -> None:
    import asyncio

    from minillm import AsyncLLM

    async def work() -> None:
        engine = AsyncLLM(engine=llm)
        try:
            for prompt in prompts:
                async for delta in engine.stream(prompt, params):
                    print(delta.text, end="", flush=True)
                print()
        finally:
            engine.close()

    asyncio.run(work())


@app.command()
@with_engine_options
def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="A model's directory, or a preset with --load-format dummy. Default: tiny-gemma."),
    ] = None,
    model_option: Annotated[str | None, typer.Option("--model", "-m", help="The same, as an option.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="The name clients use for the model.")] = None,
    log_level: Annotated[str, typer.Option(help="critical, error, warning, info, debug or trace")] = "info",
    workers: Annotated[int, typer.Option(min=1, help="Processes that handle HTTP and tokenize.")] = 1,
    max_queued: Annotated[
        int, typer.Option(min=0, help="Requests that may wait; further ones are answered with 429.")
    ] = 1024,
    header_timeout: Annotated[
        float, typer.Option(help="Seconds until a request's headers must be complete.")
    ] = TIMEOUTS.header_timeout,
    body_timeout: Annotated[
        float, typer.Option(help="Seconds until a request's body must be complete.")
    ] = TIMEOUTS.body_timeout,
    keep_alive_timeout: Annotated[
        float, typer.Option(help="Seconds until an idle connection is closed.")
    ] = TIMEOUTS.keep_alive_timeout,
    shutdown_grace: Annotated[
        float, typer.Option(help="Seconds that running requests have to finish after Ctrl-C.")
    ] = TIMEOUTS.shutdown_grace,
    **engine_options: Unpack[EngineOptions],
) -> None:
    """Serve OpenAI's API over HTTP until Ctrl-C; a second Ctrl-C ends the remaining requests at once."""
    from minillm import server

    show_logs(log_level)
    if None not in (model, model_option) and model != model_option:
        raise ConfigError(f"the model is given twice, as {model!r} and as {model_option!r}: leave one out")
    server.serve(
        model or model_option,
        host=host,
        port=port,
        served_model_name=served_model_name,
        log_level=log_level,
        workers=workers,
        max_queued=max_queued,
        header_timeout=header_timeout,
        body_timeout=body_timeout,
        keep_alive_timeout=keep_alive_timeout,
        shutdown_grace=shutdown_grace,
        **engine_options,
    )


@bench_app.command()
@with_engine_options
def offline(
    model: Model = None,
    workload: Annotated[list[str], typer.Option(help="A workload's name or its first word; repeatable.")] = OFFLINE,
    scale: Annotated[int, typer.Option(help="Divide all lengths by this.")] = 1,
    requests: Annotated[int | None, typer.Option(help="Only the first this many requests.")] = None,
    repeat: Annotated[int, typer.Option(help="Timed runs each, after one that warms up.")] = 3,
    compare: Annotated[str | None, typer.Option(help="Also measure this engine: transformers.")] = None,
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
        compare=compare,
        temperature=temperature,
        threads=threads,
        json_path=json_path,
        **engine_options,
    )


@bench_app.command("serve")
def bench_serve(
    url: Annotated[str, typer.Option(help="A server on this machine, without /v1.")] = "http://127.0.0.1:8000",
    concurrency: Annotated[
        int | None, typer.Option(help="Closed loop: clients, each with one request at a time.  [default: 8]")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: Poisson arrivals, requests a second.")] = None,
    trace: Annotated[
        str | None, typer.Option(help="Open loop: replay a traffic trace: conversation, or a file.")
    ] = None,
    speed: Annotated[float | None, typer.Option(help="Replay the trace this many times as fast.  [default: 1]")] = None,
    workload: Annotated[
        str, typer.Option(help="A workload's name or its first word; a trace brings its own.")
    ] = "chat",
    scale: Annotated[int, typer.Option(help="Divide all lengths by this.")] = 8,
    requests: Annotated[int | None, typer.Option(help="Only the first this many requests.")] = 64,
    seed: Annotated[int, typer.Option(help="Of prompts and Poisson arrivals.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 1.0,
    timeout: Annotated[float, typer.Option(help="Seconds for all of it.")] = 600.0,
    json_path: JsonPath = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the record into this file (.svg, .png, .pdf).")] = None,
) -> None:
    """Load a running server; prints rates and latencies and, last, the record as one line of JSON.

    --concurrency 16, or --rate 4, or --trace conversation --speed 2
    """
    from minillm.bench import serve

    with friendly_errors():
        serve.run(
            url,
            concurrency=concurrency,
            rate=rate,
            trace=trace,
            speed=speed,
            workload=workload,
            scale=scale,
            requests=requests,
            seed=seed,
            temperature=temperature,
            timeout=timeout,
            json_path=json_path,
            plot_path=plot,
        )


@bench_app.command()
@with_engine_options
def roofline(
    model: Model = None,
    batch: Annotated[list[int], typer.Option(help="Decode steps of so many requests at once; repeatable.")] = BATCHES,
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


@app.command("eval")
@with_engine_options
def evaluate(
    model: Model = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many questions of each set.")] = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Instead: perplexity on 4 times the context, with sinks and without.")
    ] = False,
    json_path: JsonPath = None,
    **engine_options: Any,
) -> None:
    """Measure a model's accuracy and perplexity on the embedded questions and text.

    Prints a line for each and, last, the record as one line of JSON.
    """
    from minillm import LLM, evaluate
    from minillm.bench import records
    from minillm.model.loader import resolve

    def measured() -> Iterator[dict]:
        if streaming:
            yield from evaluate.streaming(model, **engine_options)
        else:
            with LLM(model, **engine_options) as llm:
                yield from evaluate.quality(llm, limit)

    results, begun = [], records.begin(json_path)
    for result in measured():
        results.append(result)
        metric = "accuracy" if "accuracy" in result else "perplexity"
        print(f"{result['workload']:<27}{metric:<11}{result[metric]:<8}{result['seconds']:>8} s", flush=True)
    content = records.record(results, begun, model=Path(resolve(model)).name)
    if json_path is not None:
        records.write(content, json_path)
    print(json.dumps(content))


@app.command()
@with_engine_options
def build(
    model: Annotated[
        str | None, typer.Argument(help="A model's directory, or gemma-2b. Default: the embedded tiny-gemma.")
    ] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1024,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 256,
    concurrency: Annotated[int, typer.Option(help="Requests that run at once.")] = 64,
    out: Annotated[Path | None, typer.Option(help="The plan's file.  [default: MODEL.plan.json]")] = None,
    gpu_gb: Annotated[float | None, typer.Option(help="Also print what a GPU with this many GB would hold.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Then run the traffic with and without the plan, interleaved.")
    ] = False,
    json_path: JsonPath = None,
    **engine_options: Unpack[EngineOptions],
) -> None:
    """Measure this GPU for a model and its traffic; write a plan that --plan takes.

    minillm build gemma-2b --input-len 1024 --output-len 256 --concurrency 256

    It measures with random weights. Without a GPU it prints the memory needed, and the plan has options only.
    """
    from minillm.tuning import build

    show_logs()
    build.run(
        model,
        input_len=input_len,
        output_len=output_len,
        concurrency=concurrency,
        out=out,
        gpu_gb=gpu_gb,
        compare=compare,
        json_path=json_path,
        **engine_options,
    )


@app.command()
def doctor() -> None:
    """Report what this machine can run, and how to install what is missing."""
    from minillm.course import doctor

    raise typer.Exit(doctor.main())


if __name__ == "__main__":
    app()
