"""Shared by the commands: options, errors, logs."""

import errno
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from minillm.config import EngineConfig
from minillm.errors import ConfigError, MinillmError
from minillm.from_vllm.options import engine_options

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A model's directory, quantized or not, a name of `minillm models`, org/name of the Hugging Face Hub, a "
        "GGUF file, or gemma-2b with --load-format dummy. Default: the embedded tiny-gemma.",
        show_default=False,
    ),
]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="The same, as an option.")]
JsonPath = Annotated[
    Path | None,
    typer.Option("--json", help="Write the record into this file too; a name without .json: into data/results/."),
]

# Errors of the machine, not of the program: a full or read-only disk, missing rights. None: raised with a sentence.
MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, None)


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Print an error that the user can fix as one line and exit with status 2; a bug keeps its traceback."""
    try:
        yield
    except (MinillmError, OSError, ModuleNotFoundError) as error:
        if isinstance(error, OSError) and not (isinstance(error, ConnectionError) or error.errno in MACHINE):
            raise
        message = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename:
            message = f"{error.filename2 or error.filename}: {error.strerror}"
        if isinstance(error, ModuleNotFoundError):
            message += ". `minillm doctor` says what is missing and how to install it"
        print(f"minillm: {message}", file=sys.stderr)
        raise typer.Exit(2) from None


def one_model(argument: str | None, option: str | None) -> str | None:
    """Return the model, which may be an argument or an option. Raises ConfigError for two of them."""
    if None not in (argument, option) and argument != option:
        raise ConfigError(f"the model is given twice, as {argument!r} and as {option!r}: leave one out")
    return argument or option


def named_models(texts: Sequence[str]) -> dict[str | None, str | None]:
    """Return models by the names that clients use, from arguments MODEL or NAME=MODEL; None: the model's own name.

    Without arguments there is one model, None, which is the embedded one. Raises ConfigError.
    """
    models: dict[str | None, str | None] = {}
    for text in texts:
        before, equals, after = text.partition("=")
        name, model = (before, after) if equals and not Path(text).exists() else (None, text)
        if name == "" or model == "":
            raise ConfigError(f"{text!r} is not NAME=MODEL")
        if models.get(name, model) != model:
            raise ConfigError(
                f"the model is given twice, as {models[name]!r} and as {model!r}: leave one out, or name both"
            )
        models[name] = model
    return models or {None: None}


def with_names(models: Mapping[str | None, str | None], served_as: str | None = None) -> dict[str, str | None]:
    """Return what `named_models` returned, with the model's own name where none was given. Raises ConfigError.

    served_as: another name for the model that has none.
    """
    named = {name or served_as or Path(model or "tiny-gemma").name: model for name, model in models.items()}
    if len(named) < len(models) or (served_as and None not in models):
        raise ConfigError(f"name each model once, as --model NAME=MODEL, not {', '.join(map(str, models.values()))}")
    return named


def show_logs(level: str = "warning", reports_to: TextIO | None = None) -> None:
    """Write minillm's log to the terminal: what a command reports to stdout, warnings from `level` on to stderr.

    reports_to: where reports go instead, for a command whose output is on stdout.
    """
    log = logging.getLogger("minillm")
    log.setLevel(logging.INFO)
    reports = logging.StreamHandler(reports_to or sys.stdout)
    reports.addFilter(lambda record: record.levelno < logging.WARNING)
    warnings = logging.StreamHandler(sys.stderr)
    warnings.setFormatter(logging.Formatter("minillm: %(message)s"))
    warnings.setLevel(max(logging.WARNING, logging.getLevelNamesMapping().get(level.upper(), logging.WARNING)))
    log.handlers = [reports, warnings]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _parameter(field: Field) -> inspect.Parameter:
    shown, variable = field.default is not None and not isinstance(field.default, bool), field.metadata.get("envvar")
    flags = [field.metadata["flag"]] if "flag" in field.metadata else []
    option = typer.Option(
        *flags,
        help=_sentence(field.metadata["help"]),
        show_default=shown,
        envvar=variable,
        show_envvar=variable is not None,
    )
    kind = getitem(Annotated, (_given_as(field), option))
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=kind)


def _given_as(field: Field) -> Any:
    return field.metadata.get("given_as", field.type)


def with_options(*configs: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each field of these dataclasses; it gets those that were set as keywords."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command)
        kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        offered = [field for config in configs for field in fields(config) if _given_as(field) is not None]
        parameters = [*kept, *map(_parameter, offered)]
        defaults = {field.name: field.default for field in offered}

        @functools.wraps(command)
        def run(**values: Any) -> None:
            options = {field.name: values.pop(field.name) for field in offered}
            options = {name: value for name, value in options.items() if value not in (defaults[name], [])}
            if options.get("quantization") == "auto":  # the log says what was chosen, and why
                show_logs(reports_to=sys.stderr)
            with friendly_errors():
                command(**engine_options(options), **values)

        vars(run)["__signature__"] = own.replace(parameters=parameters)  # what typer makes the options from
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorated


with_engine_options = with_options(EngineConfig)
