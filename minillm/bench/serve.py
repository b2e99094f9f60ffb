"""`minillm bench serve`: clients stream completions from a server.  Lesson 99.

It measures what a user feels: time to first token (TTFT), the gaps between tokens (inter-token latency, ITL),
the whole answer (end to end), and what the operator counts: requests and tokens per second. Requests arrive in a
closed loop, as a Poisson process, or as in a trace. Unless other machines are allowed, traffic goes only to this one's
own addresses. `traffic` plans the loads, `targets` finds the servers, `generators` has the processes and `clients`
their clients; `figures` computes what `reports` and `serving_plots` show.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minillm.errors import ConfigError

from . import generators as processes
from . import records, targets, traffic, workloads
from .clients import RequestTimes
from .figures import PERCENTILES, by_position, check_slo, cost, goodput, intervals, percentiles, steady, summary
from .generators import LoadError
from .reports import arriving, generator_share, table, tables
from .traffic import REQUESTS, Load
from .workloads import BenchRequest

__all__ = [
    "PERCENTILES",
    "LoadError",
    "RequestTimes",
    "arriving",
    "generator_share",
    "percentiles",
    "run",
    "summary",
    "table",
]
BULKY = ("each", "itl_by_position")  # fields that are not printed


def run(
    url: str | Sequence[str] = "http://127.0.0.1:8000",
    *,
    concurrency: int | None = None,
    sweep: Sequence[int] | None = None,
    rate: float | None = None,
    trace: str | Path | None = None,
    speed: float | None = None,
    due: Sequence[float] | None = None,
    workload: str = traffic.PATTERNS[0],
    patterns: bool = False,
    input_len: int | Sequence[int] | None = None,
    output_len: int | Sequence[int] | None = None,
    scale: int | None = None,
    requests: int | None = REQUESTS,
    warmup: int = 1,
    generators: int = 1,
    seed: int = workloads.SEED,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    model: str | None = None,
    api_key: str | None = None,
    allow_remote: bool = False,
    slo: Mapping[str, float] | None = None,
    gpu_price: float | None = None,
    gpus: int = 1,
    timeout: float = 600.0,
    json_path: str | Path | None = None,
    plot_path: str | Path | None = None,
    quiet: bool = False,
) -> dict:
    """Load a running server and return the record. Prints a table, then one JSON line.

    url: the server, without /v1, or several, which get the same loads in turn; only addresses of this machine, unless
    allow_remote. model, api_key: what to ask there for (default: the first model listed), and with which key. Requests
    arrive in one of these ways:

    concurrency  closed loop: this many clients, each sending its next request when its last is answered (8)
    sweep        such a closed loop for each of these numbers of clients, with at least 4 requests a client
    rate         open loop: a Poisson process of this many requests per second, each sent when it is due
    trace        open loop: arrivals, lengths and shared prefixes of a trace ("conversation", or a file), `speed`
                 times as fast (1); `workload` is not used
    due          open loop: a request at each of these seconds after the run began

    patterns: the four query patterns instead of one workload: short or long input, short or long output. scale divides
    lengths (8), requests takes the first so many. input_len and output_len replace the workload by requests of exactly
    these lengths; several of them make a grid. seed: of prompts and Poisson arrivals, one more for each further load;
    a run with another seed meets none of its prompts in the server's prefix cache. vocab_size: ids to draw prompts from
    (default: the one that /v1/models reports). warmup: this many requests before each load, in no figure. timeout:
    seconds for a load. plot_path: save plots of the record. Works inside a notebook too.

    slo: most seconds of a good request, as {"ttft": 0.5, "itl": 0.05, "e2e": 10}. gpu_price: dollars for an hour of one
    of the server's `gpus`. generators: processes that share the clients. generator_s is the processor time of the
    busiest: if it is close to the run's time, the generator was the bottleneck, and more processes help.

    Requests answered 429 (queue full) are counted as refused; all other figures are those of answered ones.
    Raises ConfigError for wrong settings, another machine's address or, before the load, a file that cannot be written;
    Unreachable if no server answers; LoadError if a request failed or the timeout passed.
    """
    loads = traffic.plan(
        concurrency=concurrency,
        sweep=sweep,
        rate=rate,
        trace=trace,
        due=due,
        speed=speed,
        workload=workload,
        patterns=patterns,
        input_len=input_len,
        output_len=output_len,
        scale=scale,
        requests=requests,
    )
    _check(timeout, warmup, gpu_price, gpus)
    processes.check_count(generators)
    slo = None if slo is None else check_slo(slo)
    begun = records.begin(json_path)
    if plot_path is not None:
        from . import plots, serving_plots

        plots.check_format(plot_path)
        records.check_writable(plot_path)
    asked: dict[str, Any] = {"model": model, "api_key": api_key, "allow_remote": allow_remote}
    asked |= {"temperature": temperature, "vocab_size": vocab_size}
    urls = [url] if isinstance(url, str) else list(url)
    for each in urls:
        targets.address(each, allow_remote=allow_remote)
    servers = [targets.find(each, **asked) for each in urls]
    results: list[dict] = []
    for place, load in enumerate(loads):
        first = len(results)
        for server in servers:
            work = load.make(server.vocab_size, seed + place)
            measured, busy = processes.run(
                server.target,
                work,
                load.concurrency,
                generators=generators,
                warmup=_warmup(work, warmup),
                timeout=timeout,
            )
            facts = _facts(server, load, seed + place) | {"warmup": warmup, "generators": len(busy)}
            result = facts | _result(work, measured, seed) | {"generator_s": round(max(busy), 4)}
            if slo is not None:
                result["goodput"] = goodput(measured, slo)
            if gpu_price is not None:
                result["cost"] = cost(result, gpu_price, gpus)
            results.append(result)
        for result in results[first + 1 :]:
            result["times_first"] = _ratios(result, results[first])
    content = records.record(results, begun)
    if not quiet:
        print(tables(results), flush=True)
        short = [{name: value for name, value in result.items() if name not in BULKY} for result in results]
        print(json.dumps(content | {"results": short}))
    if json_path is not None:
        records.write(content, json_path)
    if plot_path is not None:
        serving_plots.save(content, plot_path)
    return content


def _check(timeout: float, warmup: int, gpu_price: float | None, gpus: int) -> None:
    if not timeout > 0:
        raise ConfigError(f"timeout must be above 0 seconds, not {timeout!r}")
    if not isinstance(warmup, int) or warmup < 0:
        raise ConfigError(f"warmup must be a whole number of requests from 0, not {warmup!r}")
    if gpu_price is not None and not (math.isfinite(gpu_price) and gpu_price >= 0):
        raise ConfigError(f"gpu_price must be a number of dollars from 0, not {gpu_price!r}")
    if not isinstance(gpus, int) or gpus < 1:
        raise ConfigError(f"gpus must be a whole number from 1, not {gpus!r}")


def _facts(server: targets.Server, load: Load, seed: int) -> dict[str, Any]:
    """What was asked of which server."""
    target = server.target
    asked: dict[str, Any] = {"engine": server.engine, "url": target.base, "model": target.model, "dtype": server.dtype}
    asked |= {"workload": load.name, "scale": load.scale, "seed": seed, "temperature": target.temperature}
    if not target.exact:
        asked |= {"exact_lengths": False, "prompts": "words" if target.text else "token ids"}
    return asked | load.facts


def _result(work: Sequence[BenchRequest], measured: Sequence[RequestTimes], seed: int) -> dict[str, Any]:
    """All figures of a run. Raises LoadError if a request failed."""
    failed = [each.error for each in measured if each.error]
    if failed:
        raise LoadError(f"{len(failed)} of {len(measured)} requests failed, the first with: {failed[0]}")
    answered = [each for each in measured if not each.refused]
    found = summary(work, measured)
    counted = {"tokens_counted_by": "/".join(sorted({each.counted for each in answered}))} if answered else {}
    more = {"steady": steady(measured, seed), "interval95": intervals(answered, seed)}
    return counted | found | more | {"itl_by_position": by_position(answered)}


def _ratios(result: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, float]:
    """A result's rate of tokens and median latencies in multiples of another's, at the same load."""
    pairs = {"output_tokens_per_s": (result["output_tokens_per_s"], first["output_tokens_per_s"])}
    pairs |= {name: (result[name]["p50"], first[name]["p50"]) for name in ("ttft_s", "itl_s", "e2e_s")}
    return {name: round(own / other, 4) for name, (own, other) in pairs.items() if own is not None and other}


def _warmup(work: Sequence[BenchRequest], count: int) -> list[BenchRequest]:
    """Requests as long as the first `count`; their prompts put no prefix of the measured ones into a cache."""
    chosen = itertools.islice(itertools.cycle(work), count)
    return [BenchRequest([*each.prompt[::-1]], each.output_tokens) for each in chosen]
