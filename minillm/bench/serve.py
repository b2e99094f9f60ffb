"""`minillm bench serve`: clients stream completions from a server.  Lesson 99.

It measures what a user feels: time to first token (TTFT), the gaps between tokens (inter-token latency, ITL),
the whole answer (end to end), and what the operator counts: requests and tokens per second. Requests arrive in a
closed loop, as a Poisson process, or as in a trace. Unless other machines are allowed, traffic goes only to this one's
own addresses. `traffic` plans the loads, `targets` finds the servers, `generators` has the processes and `clients`
their clients; `figures` computes what `reports` and `serving_plots` show.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import generators as processes
from . import records, targets, traffic
from .clients import RequestTimes
from .figures import PERCENTILES, by_position, cost, goodput, intervals, percentiles, steady, summary
from .generators import LoadError
from .reports import arriving, generator_share, table, tables
from .serve_bench import ServeBench
from .traffic import Load
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


def run(url: str | Sequence[str] = "http://127.0.0.1:8000", *, quiet: bool = False, **options: Any) -> dict:
    """Load a running server and return the record. Prints a table, then one JSON line, unless quiet.

    url: the server, without /v1, or several, which get the same loads in turn; only addresses of this machine, unless
    allow_remote. options: the fields of `ServeBench`. Requests arrive in one of these ways: concurrency, sweep (with at
    least 4 requests a client), rate, trace, or due. Works inside a notebook too.

    seed: one more for each further load; a run with another seed meets none of its prompts in the server's prefix
    cache. slo: as {"ttft": 0.5, "itl": 0.05, "e2e": 10}. generator_s in the record is the processor time of the busiest
    of the `generators`: if it is close to the run's time, the generator was the bottleneck, and more processes help.

    Requests answered 429 (queue full) are counted as refused; all other figures are those of answered ones.
    Raises ConfigError for wrong settings, another machine's address or, before the load, a file that cannot be written;
    Unreachable if no server answers; LoadError if a request failed or the timeout passed.
    """
    settings = ServeBench(**options)
    loads = traffic.plan(settings)
    begun = records.begin(settings.json_path)
    if settings.plot_path is not None:
        from . import plots, serving_plots

        plots.check_format(settings.plot_path)
        records.check_writable(settings.plot_path)
    urls = [url] if isinstance(url, str) else list(url)
    for each in urls:
        targets.address(each, allow_remote=settings.allow_remote)
    servers = [targets.find(each, settings) for each in urls]
    results: list[dict] = []
    for index, load in enumerate(loads):
        first = len(results)
        for server in servers:
            work = load.make(server.vocab_size, settings.seed + index)
            measured, busy = processes.run(
                server.target,
                work,
                load.concurrency,
                generators=settings.generators,
                warmup=_warmup(work, settings.warmup),
                timeout=settings.timeout,
            )
            facts = _facts(server, load, settings.seed + index) | {"warmup": settings.warmup, "generators": len(busy)}
            result = facts | _result(work, measured, settings.seed) | {"generator_s": round(max(busy), 4)}
            if settings.slo is not None:
                result["goodput"] = goodput(measured, settings.slo)
            if settings.gpu_price is not None:
                result["cost"] = cost(result, settings.gpu_price, settings.gpus)
            results.append(result)
        for result in results[first + 1 :]:
            result["times_first"] = _ratios(result, results[first])
    content = records.record(results, begun)
    if not quiet:
        print(tables(results), flush=True)
        short = [{name: value for name, value in result.items() if name not in BULKY} for result in results]
        print(json.dumps(content | {"results": short}))
    if settings.json_path is not None:
        records.write(content, settings.json_path)
    if settings.plot_path is not None:
        serving_plots.save(content, settings.plot_path)
    return content


def _facts(server: targets.Server, load: Load, seed: int) -> dict[str, Any]:
    """Return what was asked of which server."""
    target = server.target
    asked: dict[str, Any] = {"engine": server.engine, "url": target.base, "model": target.model, "dtype": server.dtype}
    asked |= {"workload": load.name, "scale": load.scale, "seed": seed, "temperature": target.temperature}
    if target.sampling:
        asked["sampling"] = dict(target.sampling)
    if not target.exact:
        asked |= {"exact_lengths": False, "prompts": "words" if target.text else "token ids"}
    return asked | load.facts


def _result(work: Sequence[BenchRequest], measured: Sequence[RequestTimes], seed: int) -> dict[str, Any]:
    """Return all figures of a run. Raises LoadError if a request failed."""
    failed = [each.error for each in measured if each.error]
    if failed:
        raise LoadError(f"{len(failed)} of {len(measured)} requests failed, the first with: {failed[0]}")
    answered = [each for each in measured if not each.refused]
    figures_of_run = summary(work, measured)
    counted = {"tokens_counted_by": "/".join(sorted({each.counted for each in answered}))} if answered else {}
    more = {"steady": steady(measured, seed), "interval95": intervals(answered, seed)}
    return counted | figures_of_run | more | {"itl_by_position": by_position(answered)}


def _ratios(result: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, float]:
    """Return a result's rate of tokens and median latencies in multiples of another's, at the same load."""
    pairs = {"output_tokens_per_s": (result["output_tokens_per_s"], first["output_tokens_per_s"])}
    pairs |= {name: (result[name]["p50"], first[name]["p50"]) for name in ("ttft_s", "itl_s", "e2e_s")}
    return {name: round(own / other, 4) for name, (own, other) in pairs.items() if own is not None and other}


def _warmup(work: Sequence[BenchRequest], count: int) -> list[BenchRequest]:
    """Return requests as long as the first `count`; their prompts put no prefix of the measured ones into a cache."""
    chosen = itertools.islice(itertools.cycle(work), count)
    return [BenchRequest([*each.prompt[::-1]], each.output_tokens) for each in chosen]
