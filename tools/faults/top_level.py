"""Faults in the package's top-level modules: options, requests, errors, overrides, the command line."""

from . import Fault

CONFIG, REQUEST, OVERRIDES = "minillm/config.py", "minillm/request.py", "minillm/overrides.py"

FAULTS = (
    Fault(
        "a GPU with an index gets a CPU's defaults",
        CONFIG,
        'device.startswith("cuda") else (256, 2048)',
        'device == "cuda" else (256, 2048)',
        "tests/test_config.py -k any_gpu",
    ),
    Fault(
        "a GPU memory utilization of 0 is accepted",
        CONFIG,
        "if share is None or not 0 < share <= 1:",
        "if share is None or not 0 <= share <= 1:",
        "tests/test_config.py -k invalid_option",
    ),
    Fault(
        "all choices of a prompt share one seed",
        REQUEST,
        "None if self.seed is None else self.seed + i",
        "self.seed",
        "tests/server/test_link.py -k choices",
    ),
    Fault(
        "min_p is ignored unless another option is set",
        REQUEST,
        "            or self.min_p > 0\n",
        "",
        "tests/runner/test_sampler.py -k 'distribution and min_p'",
    ),
    Fault(
        "min_tokens may exceed max_tokens by one",
        REQUEST,
        "self.min_tokens > self.max_tokens:",
        "self.min_tokens > self.max_tokens + 1:",
        "tests/runner/test_sampler.py -k invalid_parameters",
    ),
    Fault(
        "True is accepted as the number 1",
        "minillm/values.py",
        "isinstance(value, Integral) and not isinstance(value, bool)",
        "isinstance(value, Integral)",
        "tests/test_request.py",
    ),
    Fault(
        "a part is still reported as replaced after it is restored",
        OVERRIDES,
        "parts.origin[name] = origin\n",
        "pass\n",
        "tests/test_overrides.py -k user_supplied_merge",
    ),
    Fault(
        "calls to a replaced part are not counted",
        OVERRIDES,
        "        self.used.calls[self.name] += 1\n",
        "",
        "tests/ops/test_table.py",
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
        "stop strings are not passed on",
        "minillm/cli/__init__.py",
        "stop=stop or ()",
        "stop=()",
        "tests/project/test_cli.py -k samples_as",
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
    Fault(
        "kernels are not found where git makes no symbolic links",
        "minillm/__init__.py",
        "__path__.append(str(folders.PACKAGE.parent))",
        "pass",
        "tests/project/test_checkout.py",
    ),
    Fault(
        "data are not found where git makes no symbolic links",
        "minillm/folders.py",
        "(PACKAGE if LINKED else PACKAGE.parent)",
        "PACKAGE",
        "tests/project/test_checkout.py",
    ),
    Fault(
        "the load of other programs includes this process",
        "minillm/cores.py",
        "busy - busy_then - (own - own_then)",
        "busy - busy_then",
        "tests/test_cores.py -k without_this_process",
    ),
)
