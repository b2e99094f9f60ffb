"""`minillm report`: one page about a model on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import ModelOption, one_model, show_logs, with_engine_options
from .quality import split_names


@with_engine_options
def report(
    model: Annotated[
        str | None,
        typer.Argument(help="An unquantized model, as for `eval --model`. Default: the embedded tiny-gemma."),
    ] = None,
    model_option: ModelOption = None,
    out: Annotated[Path, typer.Option(help="The page to write; the record is written next to it, as .json.")] = Path(
        "report.html"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Few questions, short runs, and three methods.")] = False,
    versions: Annotated[
        list[str] | None,
        typer.Option(
            help="What to compare with the unquantized model: methods (int8, awq-g64), recipe files, directories, as "
            "in `minillm eval --compare`; repeatable. Default: all methods, and with --quick three.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Whose questions: isles, mmlu, mmlu_SUBJECT, a directory in MMLU's layout. Default: mmlu if it is on "
            "this machine, else isles, its embedded twin.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many questions.")] = None,
    scale: Annotated[int | None, typer.Option(min=1, help="Divide the lengths of requests by this.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of each speed measurement.")] = None,
    serve: Annotated[
        list[str] | None,
        typer.Option(help="A version to serve; repeatable. Default: the unquantized one.", show_default=False),
    ] = None,
    gpu_price: Annotated[
        float | None, typer.Option(help="Dollars for an hour of the GPU, or of this machine: prints a token's cost.")
    ] = None,
    **engine_options: Any,
) -> None:
    """Measure a model and its quantized versions: accuracy, size, speed, serving, cost; write one page about it.

    minillm report MODEL_DIR --quick --gpu-price 2.5

    The page is one HTML file that needs no network and explains its figures. The exit status is 1 if a part failed.
    """
    model = one_model(model, model_option)
    import time

    from minillm.report.run import run

    show_logs()
    begin = time.perf_counter()

    def say(line: str) -> None:
        print(f"{time.perf_counter() - begin:5.0f} s  {line}", flush=True)

    report = run(
        model,
        out=out,
        quick=quick,
        versions=split_names(versions or ()),
        task=tasks,
        limit=limit,
        scale=scale,
        requests=requests,
        served=split_names(serve or ()),
        price=gpu_price,
        say=say,
        **engine_options,
    )
    say("done")
    print(f"\n{out}: the report\n{out.with_suffix('.json')}: the record of all measurements")
    for failure in report["failures"]:
        print(f"failed: {failure['part']} of {failure['version']}: {failure['error']}")
    if report["failures"]:
        raise typer.Exit(1)
