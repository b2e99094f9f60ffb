"""The settings of `minillm bench serve`, for the command line and for `serve.run`.  Lesson 99."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm.config import Options, option, with_field_help
from minillm.errors import ConfigError

from .figures import check_slo

# Fields of a request that other settings, or the way of measuring, decide.
OWN_FIELDS = {
    *("model", "prompt", "max_tokens", "temperature", "stream", "stream_options"),
    *("ignore_eos", "return_token_ids", "n", "stop", "stop_token_ids"),
}


@dataclass(frozen=True)
class ServeBench(Options):
    """Settings of a serving benchmark: requests, arrivals and reports. Raises ConfigError."""

    allow_remote: bool = option(
        False, "Let --url name other machines: only those that you may load.", flag="--allow-remote"
    )
    model: str | None = option(None, "The model to ask for.  [default: the first listed]")
    api_key: str | None = option(None, "Sent with each request; no record has it.")
    concurrency: int | None = option(None, "Closed loop: clients, each with one request at a time.  [default: 8]")
    sweep: Sequence[int] | None = option(
        None, "Such a closed loop for each of these numbers of clients: 1,2,4,8.", given_as=str | None
    )
    rate: float | None = option(None, "Open loop: Poisson arrivals, requests a second; inf: a closed loop.")
    trace: str | Path | None = option(
        None, "Open loop: replay a traffic trace: conversation, or a file.", given_as=str | None
    )
    due: Sequence[float] | None = option(
        None, "Open loop: a request at each of these seconds after the run began.", given_as=None
    )
    speed: float | None = option(None, "Replay the trace this many times as fast.  [default: 1]")
    workload: str = option("chat", "A workload's name or its first word; a trace brings its own.")
    patterns: bool = option(
        False, "Four workloads: short and long inputs with short and long outputs.", flag="--patterns"
    )
    input_len: int | Sequence[int] | None = option(
        None, "Prompts of exactly this many tokens, not a workload's; 128,512 for a grid.", given_as=str | None
    )
    output_len: int | Sequence[int] | None = option(None, "Answers of exactly this many tokens.", given_as=str | None)
    scale: int | None = option(None, "Divide a workload's lengths by this.  [default: 8]")
    requests: int | None = option(64, "Only the first this many requests.")
    warmup: int = option(1, "Requests before the measurement, in none of its figures.", least=0)
    generators: int = option(1, "Processes of the load generator, which share the clients.", least=1)
    seed: int = option(0, "Of prompts and Poisson arrivals.")
    temperature: float = option(1.0, "0 always takes the likeliest token.")
    sampling: Mapping[str, Any] | None = option(
        None, 'More fields of each request, as JSON: {"top_p": 0.95}.', given_as=str | None
    )
    vocab_size: int | None = option(
        None, "Ids to draw prompts from.  [default: as many as the server's list of models reports]", given_as=None
    )
    slo: Mapping[str, float] | None = option(
        None, "Most seconds of a good request: ttft=0.5,itl=0.05,e2e=10; counts goodput.", given_as=str | None
    )
    gpu_price: float | None = option(None, "Dollars for a GPU and hour: prints a token's cost.")
    gpus: int = option(1, "GPUs of the server, for --gpu-price.", least=1)
    timeout: float = option(600.0, "Seconds for each load.")
    json_path: str | Path | None = option(
        None,
        "Write the record into this file too; a name without .json: into data/results/.",
        flag="--json",
        given_as=Path | None,
    )
    plot_path: str | Path | None = option(
        None, "Draw the record into this file (.svg, .png, .pdf).", flag="--plot", given_as=Path | None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.timeout > 0:
            raise ConfigError(f"timeout must be above 0 seconds, not {self.timeout!r}")
        if self.gpu_price is not None and not (math.isfinite(self.gpu_price) and self.gpu_price >= 0):
            raise ConfigError(f"gpu_price must be a number of dollars from 0, not {self.gpu_price!r}")
        if self.slo is not None:
            self._set("slo", check_slo(self.slo))
        if self.sampling is not None and not isinstance(self.sampling, Mapping):
            raise ConfigError(f'sampling takes an object of fields, such as {{"top_p": 0.95}}, not {self.sampling!r}')
        if set_by_others := OWN_FIELDS & set(self.sampling or ()):
            raise ConfigError(
                f"sampling cannot set {', '.join(sorted(set_by_others))}: the benchmark or its other options do"
            )


ServeBench.__doc__ = with_field_help(ServeBench.__doc__, ServeBench)
