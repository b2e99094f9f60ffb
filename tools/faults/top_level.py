"""Faults in the package's top-level modules: options, requests, errors, overrides, the command line."""

from . import Fault

CONFIG, REQUEST = "minillm/config.py", "minillm/request.py"

FAULTS = (
    Fault(
        "a GPU with an index gets a CPU's defaults",
        CONFIG,
        'device.startswith("cuda") else (256, 2048)',
        'device == "cuda" else (256, 2048)',
        "tests/test_config.py -k any_gpu",
    ),
    Fault(
        "all choices of a prompt share one seed",
        REQUEST,
        "None if self.seed is None else self.seed + i",
        "self.seed",
        "tests/server/test_link.py -k choices",
    ),
    Fault(
        "an unreachable server does not raise a ConnectionError",
        "minillm/errors.py",
        "class Unreachable(MinillmError, ConnectionError):",
        "class Unreachable(MinillmError):",
        "tests/test_errors.py",
    ),
    Fault(
        "a user error exits with status 0",
        "minillm/cli/options.py",
        "raise typer.Exit(2) from None",
        "raise typer.Exit(0) from None",
        "tests/project/test_cli.py -k user_error",
    ),
    Fault(
        "a chat on the command line starts with two beginning-of-text tokens",
        "minillm/cli/__init__.py",
        '[chat_prompt(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]',
        '[tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in prompts]',
        "tests/project/test_cli.py -k one_beginning_of_text",
    ),
    Fault(
        "the second choice of a prompt has the first one's number",
        "minillm/engine/llm.py",
        "prompt if isinstance(prompt, str) else None, index",
        "prompt if isinstance(prompt, str) else None, 0",
        "tests/engine/test_llm.py -k dictionaries",
    ),
)
