"""Commands that take vLLM's options too: those that ask for nothing are left out, others say what to do instead."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from .options import ANY, ENGINE

Missing = Mapping[str, tuple[tuple, str]]
TOOLS = "the server calls no tools: use response_format"
CORS = "use --cors-origins"
TOKENIZER = "the tokenizer is that of the model's directory"
# What to do instead of an engine's options, where `options` says it in Python.
ON_THE_COMMAND_LINE = {
    "enable-lora": "give --adapter, or --max-loras if all are loaded later",
    "async-scheduling": "--run-ahead 0 reads each step's tokens before the next is launched",
    "compilation-config": "--enforce-eager turns CUDA graphs off; `minillm build` tunes them",
    "cpu-offload-gb": "weights stay in the GPU's memory: quantize them, as --quantization int8",
    "enable-chunked-prefill": "prompts are always cut into chunks; --policy whole runs them in one step",
    "enable-sleep-mode": "stop the server, and start it again",
    **dict.fromkeys(("generation-config", "override-generation-config"), "requests have temperature and the like"),
    "kv-cache-memory-bytes": "use --num-blocks, or --gpu-memory-utilization",
    "logits-processors": "requests have logit_bias",
    "profiler-config": "use --trace FILE",
    "speculative-config": "use --speculate ngram, which drafts from the text itself, or a draft model's directory",
    **dict.fromkeys(("tokenizer-mode", "tokenizer-revision"), TOKENIZER),
}
# Options of `vllm serve`: the values that ask for nothing, and what to do instead of any other.
SERVE: Missing = {
    **{
        name: (nothing, ON_THE_COMMAND_LINE.get(name, instead))
        for name, (nothing, instead) in ((name.replace("_", "-"), each) for name, each in ENGINE.items())
        if name != "served-model-name"
    },
    "tokenizer": ((), TOKENIZER),
    "disable-log-requests": ((True,), ""),
    "enable-log-requests": ((False,), "--log-format json has a line for each request, without its text"),
    "uvicorn-log-level": ((), "use --log-level"),
    "allowed-origins": ((), CORS),
    "chat-template": ((), "put the template into the model's tokenizer_config.json"),
    "response-role": (("assistant",), "the role is always assistant"),
    "enable-auto-tool-choice": ((False,), TOOLS),
    "tool-call-parser": ((), TOOLS),
    "reasoning-parser": ((), "read the answer's text yourself"),
    "ssl-keyfile": ((), "let a proxy end TLS"),
    "ssl-certfile": ((), "let a proxy end TLS"),
    "root-path": (("",), "let a proxy rewrite paths"),
    "disable-frontend-multiprocessing": ((ANY, True), ""),
    "enable-log-outputs": ((False,), "--log-format json has a line for each request, without its text"),
    "max-log-len": ((ANY,), ""),
    "disable-uvicorn-access-log": ((ANY, True), ""),
    "log-config-file": ((), "use --log-level and --log-format"),
    "config": ((), "give the options on the command line"),
    "uds": ((), "use --host and --port"),
    "headless": ((False,), "an engine runs on one machine"),
    "middleware": ((), "let a proxy do it"),
    "allow-credentials": ((False,), CORS),
    "allowed-methods": ((), CORS),
    "allowed-headers": ((), CORS),
    "lora-modules": ((), "use --adapter, once for each"),
    "chat-template-content-format": (("auto", "string", "openai"), "contents in parts are joined as text"),
    "return-tokens-as-token-ids": ((False,), "requests have return_token_ids"),
    "enable-request-id-headers": ((ANY, True), ""),  # each response has the header
    "enable-prompt-tokens-details": ((ANY, True), ""),  # usage always has them
    "enable-server-load-tracking": ((False,), "the numbers of requests are at /metrics"),
}
SERVE_NAMES = {
    "api-server-count": "workers",
    "num-gpu-blocks-override": "num-blocks",
    "scheduling-policy": "policy",
    "tp": "tensor-parallel-size",
    "dcp": "decode-context-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "q": "quantization",
}
# The same for `vllm bench serve`.
BENCH: Missing = {
    "backend": (("vllm", "openai"), "chats are not measured: requests go to /v1/completions"),
    "endpoint-type": (("vllm", "openai"), "chats are not measured: requests go to /v1/completions"),
    "endpoint": (("/v1/completions",), "requests go to /v1/completions"),
    "host": ((), "use --url http://HOST:PORT"),
    "port": ((), "use --url http://HOST:PORT"),
    "dataset-name": (("random",), "use --workload, --trace, or --input-len and --output-len"),
    "dataset-path": ((), "use --workload, or --trace FILE"),
    "random-range-ratio": (("0", "0.0"), "--input-len and --output-len are exact"),
    "burstiness": (("1", "1.0"), "--rate has Poisson arrivals"),
    "goodput": ((), "use --slo ttft=0.5,itl=0.05,e2e=10, in seconds"),
    "save-result": ((False,), "use --json FILE"),
    "save-detailed": ((False,), "use --json FILE"),
    "append-result": ((False,), "use --json FILE, another one each time"),
    "label": ((ANY,), ""),
    "metadata": ((), "use --json FILE, whose record has all settings"),
    "profile": ((False,), "use torch.profiler around LLM.generate"),
    "ready-check-timeout-sec": ((ANY,), ""),
    "result-dir": ((), "use --json FILE"),
    "tokenizer": ((ANY,), ""),  # the server makes prompts of exact lengths
    "top-p": ((), "use --sampling '{\"top_p\": 0.95}'"),
    "top-k": ((), "use --sampling '{\"top_k\": 50}'"),
    "min-p": ((), "use --sampling '{\"min_p\": 0.05}'"),
    "percentile-metrics": ((ANY,), ""),
    "metric-percentiles": ((ANY,), ""),
    "ignore-eos": ((ANY, True), ""),  # every answer has its exact length
    "disable-tqdm": ((ANY, True), ""),
    "trust-remote-code": ((ANY, True), ""),
}
BENCH_NAMES = {
    "base-url": "url",
    "num-prompts": "requests",
    "num-warmups": "warmup",
    "max-concurrency": "concurrency",
    "request-rate": "rate",
    "random-input-len": "input-len",
    "random-output-len": "output-len",
    "result-filename": "json",
    "extra-body": "sampling",
}
# Commands of vLLM's, and what to do instead.
COMMANDS = {
    "chat": "`minillm generate --chat` answers one prompt, and the server's page at / any number",
    "complete": "use `minillm generate`",
    "run-batch": "send the requests to `minillm serve`, or give all prompts to LLM.generate",
    "collect-env": "use `minillm doctor`",
    "throughput": "use `minillm bench offline`",
    "latency": "use `minillm bench offline --workload single`",
    "startup": "`minillm serve --log-level info` says when it serves",
    "sweep": "use `minillm bench serve --sweep`",
}
COUNTS = ("max-model-len", "max-num-batched-tokens")
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
# Options of engines that are flags, although any value is accepted from Python.
FLAGS = {
    "async-scheduling",
    "calculate-kv-scales",
    "disable-cascade-attn",
    "disable-custom-all-reduce",
    "disable-log-stats",
    "trust-remote-code",
    "use-v2-block-manager",
}


def translated(args: Sequence[str], known: set[str], missing: Missing, names: Mapping[str, str]) -> Iterator[str]:
    """Yield arguments as the command has them, of some that may be vLLM's.

    known: the command's own options, dashes included; missing: option -> as in `options`; names: vLLM's name
    -> the command's. Raises typer.BadParameter.
    """
    left = iter(args)
    for argument in left:
        if argument == "--":
            yield argument
            yield from left
            return
        name, equals, value = argument.partition("=")
        option = name.lstrip("-").replace("_", "-")
        option = names.get(option, option)
        negated = option.startswith("no-") and option.removeprefix("no-") in missing
        option = option.removeprefix("no-") if negated else option
        long = name.startswith("--") or name in ("-tp", "-pp", "-dcp", "-dp", "-q")
        if argument.startswith("-O") and "-O" not in known:
            if argument == "-O":
                argument += f" {next(left, '')}"
            print(f"minillm: {argument} has no effect here", file=sys.stderr)
        elif option in COUNTS and long:
            yield f"--{option}={_count(value if equals else next(left, ''))}"
        elif not long or name in known:
            yield argument
        elif f"--{option}" in known or option not in missing:
            yield f"--{option}{equals}{value}"
        else:
            nothing, instead = missing[option]
            flag = negated or option in FLAGS or any(isinstance(each, bool) for each in nothing)
            asked: Any = not negated if flag else value if equals else next(left, "")
            if ANY not in nothing and asked not in nothing and str(asked) not in map(str, nothing):
                reason = f"minillm has no such option; {instead}"
                raise typer.BadParameter(reason, param_hint=f"{name}={asked}" if not flag else name)
            print(f"minillm: {name} has no effect here", file=sys.stderr)


def _count(text: str) -> str:
    """Return a number that may be written as vLLM's options take it: "8k" is 8000, "8K" is 8192."""
    number, unit = text[:-1], text[-1:]
    try:
        return str(int(float(number) * UNITS[unit]))
    except (KeyError, ValueError, OverflowError):
        return "-1" if text == "auto" else text


class Group(TyperGroup):
    """A group of commands that knows vLLM's too."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in COMMANDS:
            raise typer.BadParameter(f"minillm has no such command; {COMMANDS[cmd_name]}", param_hint=cmd_name)
        return command


class _Command(TyperCommand):
    missing: ClassVar[Missing] = {}
    names: ClassVar[Mapping[str, str]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        return super().parse_args(ctx, list(translated(args, known, self.missing, self.names)))


class Serve(_Command):
    """`minillm serve`."""

    missing, names = SERVE, SERVE_NAMES


class BenchServe(_Command):
    """`minillm bench serve`."""

    missing, names = BENCH, BENCH_NAMES
