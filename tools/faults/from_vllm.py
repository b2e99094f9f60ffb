"""Faults in what translates code written for vLLM."""

from . import Fault

FAULTS = (
    Fault(
        "an option of vLLM's that is missing here is taken and forgotten",
        "minillm/from_vllm/options.py",
        '            raise error(f"{name}=',
        '            error(f"{name}=',
        "tests/from_vllm -k instead",
    ),
    Fault(
        "an option of vLLM's server that asks for something is dropped",
        "minillm/from_vllm/command_line.py",
        "raise typer.BadParameter(reason",
        "typer.BadParameter(reason",
        "tests/project/test_cli.py -k other_options",
    ),
    Fault(
        "the log-probabilities of further choices are plain numbers",
        "minillm/from_vllm/scripts.py",
        "[cls.of(each) for each in done.others]",
        "done.others",
        "tests/from_vllm -k log_probability",
    ),
    Fault(
        "the command line does not know vLLM's values",
        "minillm/cli/options.py",
        "command(**engine_options(",
        "command(**dict(",
        "tests/project/test_cli.py -k vllms_values",
    ),
)
