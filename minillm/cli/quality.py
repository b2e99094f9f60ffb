"""`minillm quantize` and `minillm eval`: make a model smaller, and measure what it loses."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from minillm.errors import ConfigError

from .options import JsonPath, Model, ModelOption, friendly_errors, one_model, with_engine_options

# option of `minillm quantize` -> the parameter of `Method` that it sets
PARAMETERS = {
    "--group-size": "group_size",
    "--zero-points": "symmetric",
    "--act-order": "act_order",
    "--per-tensor": "scales",
    "--static": "static",
    "--sparsity": "sparsity",
}


@with_engine_options
def evaluate(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="With --compare: methods (int8, awq-g64, int4-g32-zeros+int8, w8a8-rotate, pruned-s70), recipe "
            "files, or directories. Default: all methods, and w8a8-rotate.",
            show_default=False,
        ),
    ] = None,
    model: Model = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Quantize the model by each method, and print what each one loses.")
    ] = False,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="What to measure: isles, text, mmlu, mmlu_SUBJECT, a directory in MMLU's layout. Default: isles,text.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many questions of each set.")] = None,
    seeds: Annotated[
        int,
        typer.Option(min=1, help="With --compare: quantize with this many seeds; take the median by KL."),
    ] = 1,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Instead: perplexity on 4 times the context, with sinks and without.")
    ] = False,
    json_path: JsonPath = None,
    **engine_options: Any,
) -> None:
    """Measure a model's accuracy and perplexity on the embedded questions and text, or on MMLU.

    Prints a line for each and, last, the record as one line of JSON.

    minillm eval --compare int8,awq-g64,w8a8-rotate
    """
    from minillm import LLM, evaluate, pretrained
    from minillm.bench import records
    from minillm.model.loader import resolve

    if names and not compare:
        raise ConfigError(f"{names[0]}: names are for --compare; give the model with --model")
    if seeds > 1 and not compare:
        raise ConfigError("--seeds repeats the calibrations of --compare: give that too")
    if streaming and (compare or tasks):
        raise ConfigError("--streaming measures its own workload: leave --compare and --tasks out")
    chosen = split_names([tasks or ""])
    if compare and len(chosen) > 1:
        raise ConfigError(f"--compare asks the questions of one task, not of {', '.join(chosen)}")

    source = Path(resolve(model))

    def measured() -> Iterator[dict]:
        if streaming:
            yield from evaluate.streaming(model, **engine_options)
        elif compare:
            task = {"task": chosen[0]} if chosen else {}
            yield from evaluate.compare(
                split_names(names or ()), model, limit=limit, seeds=seeds, **task, **engine_options
            )
        else:
            workloads = evaluate.workloads(chosen) if chosen else None
            with LLM(model, **engine_options) as llm:
                yield from evaluate.quality(llm, limit, workloads)

    results, begun = [], records.begin(json_path)
    if compare:
        print(LOSSES_HEAD)
    for result in measured():
        results.append(result)
        print(_losses(result) if compare else _quality(result), flush=True)
    name = pretrained.model_name(source)
    content = records.record(results, begun, model=name)
    if origin := pretrained.origin(source):
        content |= {"source": origin.source, "rounded": origin.rounded}
        if origin.remark:
            print(f"{name}: {origin.remark}")
    records.publish(content, json_path)


def split_names(texts: Iterable[str]) -> list[str]:
    """["int8,int4", "awq"] -> ["int8", "int4", "awq"]"""
    return [name for each in texts for name in each.split(",") if name]


def _quality(result: dict) -> str:
    metric = "accuracy" if "accuracy" in result else "perplexity"
    return f"{result['workload']:<27}{metric:<11}{result[metric]:<8}{result['seconds']:>8} s"


LOSSES_HEAD = (
    f"{'':<20}{'':>12}{'':>12}{'KL to':>11}{'':>10}{'points':>8}{'95% interval':>18}\n"
    f"{'method':<20}{'bytes':>12}{'perplexity':>12}{'float32':>11}{'accuracy':>10}{'lost':>8}{'of the loss':>18}"
)


def _losses(result: dict) -> str:
    low, high = result["loss_interval"]
    return (
        f"{result['quantization']:<20}{result['bytes']:>12,}{result['perplexity']:>12.4f}{result['kl']:>11.2g}"
        f"{result['accuracy']:>10.2%}{result['loss_points']:>8.2f}{f'{low:.2f} to {high:.2f}':>18}"
        f"{result['seconds']:>8.0f} s{'  simulated' if result['simulated'] else ''}"
    )


def quantize(
    model: Annotated[
        str | None, typer.Argument(help="A model, as for `eval --model`. Default: the embedded tiny-gemma.")
    ] = None,
    model_option: ModelOption = None,
    out: Annotated[Path | None, typer.Option(help="The directory to write; it must be new or empty.")] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="int8, int4, fp8, w8a8, smoothquant, awq, gptq or w4a8. Simulated, so for accuracy and not for speed: "
            "nvfp4, mxfp4, sparse24 or pruned.",
            show_default=False,
        ),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="int4, awq, gptq, w4a8: inputs that share a scale. Default: 128, 64 or 32.")
    ] = None,
    zero_points: Annotated[
        bool, typer.Option("--zero-points", help="The same: a zero point for each group (not symmetric).")
    ] = False,
    act_order: Annotated[
        bool, typer.Option("--act-order", help="gptq: round the most important inputs first.")
    ] = False,
    per_tensor: Annotated[bool, typer.Option("--per-tensor", help="fp8: one scale for each matrix.")] = False,
    static: Annotated[
        bool, typer.Option("--static", help="fp8, w8a8, smoothquant, w4a8: one scale for all tokens' activations.")
    ] = False,
    sparsity: Annotated[
        float | None, typer.Option(help="pruned: the share of each matrix that becomes 0. Default: 0.5.")
    ] = None,
    head: Annotated[str | None, typer.Option(help="int8 or fp8: the output head, and a tied embedding.")] = None,
    recipe: Annotated[
        Path | None, typer.Option(help='A JSON file instead of --method: {"layers.0.*": "int8", "layers.*": "awq"}.')
    ] = None,
    rotate: Annotated[
        bool,
        typer.Option("--rotate", help="Rotate the model first, so that its activations lose their outliers (QuaRot)."),
    ] = False,
    text: Annotated[Path | None, typer.Option(help="A text file to calibrate on. Default: the embedded one.")] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Stretches of the text to calibrate on. Default: 64; 16 for a large model on a CPU."),
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each.")] = 256,
    seed: Annotated[int, typer.Option(help="Chooses where they begin, and the signs of --rotate.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or a GPU as cuda:1")] = "auto",
) -> None:
    """Quantize a model and save it in compressed-tensors' layout.

    minillm loads whatever it writes; vLLM and transformers load most of it.

    minillm quantize --method awq --out tiny-gemma-awq
    """
    with friendly_errors():
        from minillm.calibration import methods, quantize

        model = one_model(model, model_option)
        if out is None:
            raise ConfigError("--out is missing: name the directory to write")
        if (method is None) == (recipe is None):
            raise ConfigError(f"give --method or --recipe; methods are: {', '.join(methods.METHODS)}")
        parameters: dict[str, Any] = {
            "--group-size": group_size,
            "--zero-points": False if zero_points else None,
            "--act-order": act_order or None,
            "--per-tensor": "tensor" if per_tensor else None,
            "--static": static or None,
            "--sparsity": sparsity,
        }
        parameters = {option: value for option, value in parameters.items() if value is not None}
        if recipe is not None:
            if unused := [*parameters, *([] if head is None else ["--head"])]:
                raise ConfigError(f"--recipe leaves no use for {', '.join(unused)}: write that into the file")
            chosen = methods.MethodRecipe.read(recipe)
        else:
            own = methods.Method(method or "")
            taken = methods.PARAMETERS[own.name]
            if unused := [option for option in parameters if PARAMETERS[option] not in taken]:
                usable = ", ".join(option for option, name in PARAMETERS.items() if name in taken)
                raise ConfigError(f"{method} has no use for {', '.join(unused)}; it takes: {usable or 'none of them'}")
            own = replace(own, **{PARAMETERS[option]: value for option, value in parameters.items()})
            chosen = methods.MethodRecipe.of(own, head)
        done = quantize.quantize(
            model,
            replace(chosen, rotate=rotate),
            out,
            text=text,
            rows=rows,
            length=length,
            seed=seed,
            device=device,
            progress=True,
        )
        share = done["bytes"] / done["dense_bytes"]
        print(f"{out}: {done['bytes']:,} bytes, {share:.1%} of {done['dense_bytes']:,}, in {done['seconds']} s")
