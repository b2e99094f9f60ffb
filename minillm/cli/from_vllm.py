"""Commands that take vLLM's options too: those that ask for nothing are left out, others say what to do instead."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand

from minillm.from_vllm import ANY, ENGINE

Missing = Mapping[str, tuple[tuple, str]]
TOOLS = "the server calls no tools: use response_format"
# Options of `vllm serve`: the values that ask for nothing, and what to do instead of any other.
SERVE: Missing = {
    **{name.replace("_", "-"): each for name, each in ENGINE.items() if name not in ("served_model_name",)},
    "disable-log-requests": ((True,), ""),
    "enable-log-requests": ((False,), "--log-format json has a line for each request, without its text"),
    "uvicorn-log-level": ((), "use --log-level"),
    "allowed-origins": ((), "let a proxy add CORS headers for browsers on other origins"),
    "chat-template": ((), "put the template into the model's tokenizer_config.json"),
    "response-role": (("assistant",), "the role is always assistant"),
    "enable-auto-tool-choice": ((False,), TOOLS),
    "tool-call-parser": ((), TOOLS),
    "reasoning-parser": ((), "read the answer's text yourself"),
    "ssl-keyfile": ((), "let a proxy end TLS"),
    "ssl-certfile": ((), "let a proxy end TLS"),
    "root-path": (("",), "let a proxy rewrite paths"),
    "disable-frontend-multiprocessing": ((ANY, True), ""),
}
SERVE_NAMES = {
    "api-server-count": "workers",
    "num-gpu-blocks-override": "num-blocks",
    "scheduling-policy": "policy",
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
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
    "save-result": ((), "use --json FILE"),
    "result-dir": ((), "use --json FILE"),
    "tokenizer": ((ANY,), ""),  # the server makes prompts of exact lengths
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
    "served-model-name": "model",
    "result-filename": "json",
}
# Options of engines that are flags, although any value is accepted from Python.
FLAGS = {
    "async-scheduling",
    "disable-cascade-attn",
    "disable-custom-all-reduce",
    "disable-log-stats",
    "trust-remote-code",
    "use-v2-block-manager",
}


def translated(args: Sequence[str], known: set[str], missing: Missing, names: Mapping[str, str]) -> Iterator[str]:
    """Arguments as the command has them, of some that may be vLLM's.

    known: the command's own options, dashes included; missing: option -> as in `minillm.from_vllm`; names: vLLM's name
    -> the command's. Raises typer.BadParameter.
    """
    left = iter(args)
    for argument in left:
        if argument == "--":
            yield argument
            yield from left
            return
        given, equals, value = argument.partition("=")
        option = given.lstrip("-").replace("_", "-")
        option = names.get(option, option)
        negated = option.startswith("no-") and option.removeprefix("no-") in missing
        option = option.removeprefix("no-") if negated else option
        long = given.startswith("--") or given in ("-tp", "-pp", "-dp")
        if not long or given in known:
            yield argument
        elif f"--{option}" in known or option not in missing:
            yield f"--{option}{equals}{value}"
        else:
            nothing, instead = missing[option]
            flag = negated or option in FLAGS or any(isinstance(each, bool) for each in nothing)
            asked: Any = not negated if flag else value if equals else next(left, "")
            if ANY not in nothing and asked not in nothing and str(asked) not in map(str, nothing):
                reason = f"minillm has no such option; {instead}"
                raise typer.BadParameter(reason, param_hint=f"{given}={asked}" if not flag else given)
            print(f"minillm: {given} has no effect here", file=sys.stderr)


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
