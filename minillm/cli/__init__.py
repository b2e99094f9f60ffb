"""The command `minillm`. Every command imports what it needs when it runs: `minillm --help` never waits for torch.

Options, printing, and errors on one line belong here. Anything that a Python caller could want does not.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from minillm.config import EngineConfig, EngineOptions
from minillm.errors import ConfigError
from minillm.from_vllm.command_line import Group, Serve
from minillm.server.config import ServerConfig, ServerOptions, split
from minillm.version import __version__

from .bench import bench_app
from .course import course_app
from .models import download, hint_at_trained, models
from .options import JsonPath, Model, named_models, show_logs, with_engine_options, with_names, with_options
from .quality import evaluate, quantize
from .report import report

if TYPE_CHECKING:  # the commands import them when they run
    from minillm import LLM, SamplingParams
    from minillm.request import Prompt

log = logging.getLogger(__name__)

app = typer.Typer(
    name="minillm",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_app, name="bench")
app.add_typer(course_app, name="course")
app.command("eval")(evaluate)
app.command()(quantize)
app.command()(report)
app.command()(models)
app.command()(download)


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
    from minillm import LLM, SamplingParams, Tokenizer
    from minillm.engine.inputs import chat_prompt
    from minillm.model.loader import resolve

    if chat and model is None:
        hint_at_trained()
    # --seed is the engine's, and seeds every request that names no seed of its own.
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop=stop or ())
    each: list[Prompt] = [*prompts]
    tokenizer = None
    if chat:  # a model without a chat template is refused before its weights are read
        source = resolve(model)
        if isinstance(source, Path) and (source / "tokenizer.json").exists():
            tokenizer = Tokenizer.from_pretrained(source)
        each = [chat_prompt(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    with LLM(model, tokenizer, **engine_options) as llm:
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


@app.command(cls=Serve)
@with_options(ServerConfig, EngineConfig)
def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="A directory, a name of `minillm models`, org/name, a GGUF file. Default: tiny-gemma."),
    ] = None,
    model_option: Annotated[
        list[str] | None,
        typer.Option(
            "--model", "-m", help="The same, as an option. As NAME=MODEL, repeatable: several models, on Ray."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="The name clients use for the model.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="Options for this hardware by purpose: auto, or a name of --list-profiles.")
    ] = None,
    list_profiles: Annotated[
        bool, typer.Option("--list-profiles", help="Print the profiles of the model on this hardware, and exit.")
    ] = False,
    replicas: Annotated[int | None, typer.Option(min=1, help="Engines of each model, run by Ray.")] = None,
    replica_cpus: Annotated[float, typer.Option(help="CPUs that Ray reserves for a replica.")] = 1.0,
    replica_gpus: Annotated[
        float | None, typer.Option(help="The same of GPUs; 0.5 shares one.  [default: 1 if there are any]")
    ] = None,
    of_model: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Settings of one model, as NAME:replicas=2,max_replicas=4,gpus=0.5,max_num_seqs=64; repeatable. "
            "max_replicas: as many while more than waiting_tokens wait on each.",
        ),
    ] = None,
    ray_address: Annotated[str | None, typer.Option(help="A Ray cluster to join.  [default: start one here]")] = None,
    join: Annotated[
        bool, typer.Option("--join", help="Only HTTP workers, for models that are served in the cluster already.")
    ] = False,
    router: Annotated[
        str, typer.Option(help="What chooses a replica: prefix, load, or your function as MODULE:NAME.")
    ] = "prefix",
    **options: Unpack[ServerOptions],
) -> None:
    """Serve OpenAI's API over HTTP until Ctrl-C; a second Ctrl-C ends the remaining requests at once."""
    from minillm import server
    from minillm.server import logs

    level = options.get("log_level", "info")
    if options.get("log_format") == "json":
        logs.set_up("json", level)
    else:
        show_logs(level)
        logs.unhurried()
    named = named_models([*([model] if model else []), *(model_option or [])])
    if join or len(named) > 1 or None not in named or replicas is not None:
        from minillm.deploy.serving import serve_replicas
        from minillm.deploy.settings import models_of

        if list_profiles:
            raise ConfigError("--list-profiles looks at one model, without --replicas")
        if join:
            if model or model_option or replicas or of_model:
                raise ConfigError("--join takes the models that are served in the cluster: name none")
            serve_replicas(None, host=host, port=port, ray_address=ray_address, router=router, **options)
            return
        _, engine = split(options)
        common = {"replicas": replicas or 1, "cpus": replica_cpus, "gpus": replica_gpus, "profile": profile}
        serve_replicas(
            models_of(with_names(named, served_model_name), common | {"options": engine}, of_model or ()),
            host=host,
            port=port,
            ray_address=ray_address,
            router=router,
            **{name: value for name, value in options.items() if name not in engine},
        )
        return
    if of_model or ray_address:
        raise ConfigError("--set and --ray-address are for models that have replicas: add --replicas")
    (model,) = named.values()
    if list_profiles:
        from minillm.advice import profiles

        print(profiles.find(model, **split(options)[1]))
        return
    server.serve(
        model,
        host=host,
        port=port,
        served_model_name=served_model_name,
        profile=profile,
        **options,
    )


@app.command()
@with_engine_options
def build(
    model: Annotated[
        str | None, typer.Argument(help="A model, as for serve, or gemma-2b. Default: the embedded tiny-gemma.")
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
