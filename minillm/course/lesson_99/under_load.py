"""One load for several engines: the engine's own parts, a learner's, and each of these alone.  Lesson 99."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minillm import ops, using
from minillm.bench import serve
from minillm.bench.offline import STEADY
from minillm.errors import Unreachable
from minillm.overrides import OverrideError

Replacements = Mapping[str, Callable]  # `using`'s arguments
ENGINE, YOURS, AGAIN = "the engine", "yours", "the engine, once more"
CONTROL = "the engine's own norm, by `using`"
SENT_AS_IDS = "bpe_merge"  # prompts of a load are token ids: nothing is tokenized
SECONDS = 120  # a run that takes longer has a problem


@dataclass
class Outcome:
    """The outcome of a load for one engine.

    runs: the result of each run, as in a record of `serve.run`. calls: how often each replaced part ran. problem: why
    a run failed; there are no others after it.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    problem: str | None = None

    @property
    def idle(self) -> list[str]:
        """The replaced parts that never ran."""
        return [name for name, calls in self.calls.items() if not calls]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second: the median of the runs."""
        return statistics.median(run["output_tokens_per_s"] for run in self.runs)

    def ms(self, wait: str, percentile: str) -> float:
        """The median of the runs' waits ("ttft_s", "itl_s" or "e2e_s") at a percentile ("p50"), in milliseconds."""
        return 1e3 * statistics.median(run[wait][percentile] for run in self.runs)


def engines(device: str, plain: Replacements, kernels: Replacements) -> dict[str, Replacements]:
    """{name: replacements} for `send`: none, all of a learner's parts, the control, each of the parts alone, and none.

    plain, kernels: of `earlier.written()`; a kernel takes the place of a plain part. Parts that a load does not call
    are left out. Without any part, only the engine is sent to.
    """
    alone = {name: {name: part} for name, part in plain.items() if name != SENT_AS_IDS}
    alone |= {f"{name}, kernel": {name: part} for name, part in kernels.items()}
    found: dict[str, Replacements] = {ENGINE: {}}
    if alone:
        together = {name: part for parts in alone.values() for name, part in parts.items()}
        found |= {YOURS: together, **control(device), **alone, AGAIN: {}}
    return found


def control(device: str) -> dict[str, Replacements]:
    """The engine's own norm as a replacement: what replacing an operation costs, whoever wrote it.

    On a GPU, replaced operations run without CUDA graphs.
    """
    operations = ops.on(device)
    own = operations.own[operations.names.index("rms_norm")]
    return {CONTROL: {"rms_norm": lambda *args: own(*args)}}


def send(url: str, engines: Mapping[str, Replacements], *, rounds: int = 1, **load: Any) -> dict[str, Outcome]:
    """Send one load to a server of this process with each of the replacements in place: {name: Outcome}.

    rounds: how often all take their turn. load: options of `serve.run`; its `warmup` comes before each run. If requests
    fail with one of the replacements, or do not end within SECONDS, the others still run. Prints a line for each run.
    """
    found = {name: Outcome(calls=dict.fromkeys(parts, 0)) for name, parts in engines.items()}
    for _ in range(rounds):
        for name, parts in engines.items():
            outcome = found[name]
            if outcome.problem is not None:
                continue
            try:
                with using(capturable=False, **parts) as used:
                    outcome.runs += serve.run(url, **({"timeout": SECONDS} | load | {"quiet": True}))["results"]
            except (serve.LoadError, OverrideError, Unreachable) as error:
                outcome.problem = str(error).splitlines()[0]
                print(f"{name}: {outcome.problem}")
            else:
                print(f"{name}: {outcome.runs[-1]['output_tokens_per_s']:,.0f} tokens/s")
                outcome.calls = {part: calls + used.calls[part] for part, calls in outcome.calls.items()}
    return found


def own(outcomes: Mapping[str, Outcome]) -> Outcome:
    """The engine's own parts: the runs of its first and of its last line, in the order in which they ran.

    So its speed, with one run in each line, is the mean of the two. If one line has a problem, the other counts alone.
    """
    lines = [outcomes[name] for name in (ENGINE, AGAIN) if name in outcomes]
    good = [each for each in lines if each.problem is None]
    if not good:
        return lines[0]
    return Outcome([run for runs in zip(*(each.runs for each in good), strict=True) for run in runs])


def whole(outcomes: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """The rows of the report card: the engine's own parts, both its lines together, and all of the learner's."""
    found = {ENGINE: own(outcomes)} if ENGINE in outcomes else {}
    return found | {name: outcomes[name] for name in (YOURS,) if name in outcomes}


def share(rows: Mapping[str, Outcome]) -> float | None:
    """The learner's tokens per second in % of the engine's; None if one of them has none. rows: of `whole`."""
    if any(name not in rows or rows[name].problem is not None for name in (ENGINE, YOURS)):
        return None
    return 100 * rows[YOURS].tokens_per_s / rows[ENGINE].tokens_per_s


def table(outcomes: Mapping[str, Outcome], more: Mapping[str, Callable[[Outcome], str]] | None = None) -> str:
    """Tokens per second and waits in milliseconds, a line for each engine. more: further columns, by their headings."""
    columns: dict[str, Callable[[Outcome], str]] = {
        **(more or {}),
        "tokens/s": lambda each: f"{each.tokens_per_s:,.0f}",
        "TTFT p50": lambda each: f"{each.ms('ttft_s', 'p50'):.1f}",
        "ITL p50": lambda each: f"{each.ms('itl_s', 'p50'):.2f}",
        "ITL p99 (ms)": lambda each: f"{each.ms('itl_s', 'p99'):.2f}",
    }
    width = max(map(len, outcomes)) + 1
    lines = [" " * width + "".join(f"{heading:>{len(heading) + 3}}" for heading in columns)]
    for name, outcome in outcomes.items():
        cells = (f"{value(outcome):>{len(heading) + 3}}" for heading, value in columns.items())
        lines.append(f"{name:{width}}" + (f"   {outcome.problem}" if outcome.problem else "".join(cells)))
    return "\n".join(lines)


def ratios_table(outcomes: Mapping[str, Outcome]) -> str:
    """Tokens per second in multiples of `own`'s, a line for each engine: of all rounds, and their range; a caveat."""
    engine = own(outcomes)
    if engine.problem is not None:
        return f"nothing to compare with: {engine.problem}"
    width = max(map(len, outcomes))
    lines = [f"{'':{width}}  tokens/s, in multiples of the engine's"]
    for name, outcome in outcomes.items():
        if outcome.problem is not None:
            said = f"  {outcome.problem}"
        else:
            said = f"{outcome.tokens_per_s / engine.tokens_per_s:6.2f}{_rounds(outcome, engine)}"
            said += f"   did not run: {', '.join(outcome.idle)}" if outcome.idle else ""
        lines.append(f"{name:{width}}{said}")
    return "\n".join(lines + [warning for warning in [caveat(outcomes)] if warning])


def engine_runs(outcomes: Mapping[str, Outcome]) -> str:
    """The speed of each of the engine's runs, and the caveat, if there is one."""
    speeds = [f"{run['output_tokens_per_s']:,.0f}" for run in own(outcomes).runs]
    said = f"the engine's runs: {' and '.join(speeds) or 'no'} tokens/s"
    return "\n".join([said] + [warning for warning in [caveat(outcomes)] if warning])


def caveat(outcomes: Mapping[str, Outcome]) -> str:
    """The warning to print if these speeds show another program's load; else an empty string.

    They do if the engine's first and last line differ by more than STEADY, or if another is that much faster than it:
    the engine spends too little of a step in one part for that.
    """
    engine = own(outcomes)
    if engine.problem is not None:
        return ""
    ratios = {n: each.tokens_per_s / engine.tokens_per_s for n, each in outcomes.items() if each.problem is None}
    if ENGINE in ratios and AGAIN in ratios and (differ := abs(ratios[ENGINE] - ratios[AGAIN])) > STEADY:
        found = f"the engine's first and last line differ by {differ:.2f}"
    elif ratios[fastest := max(ratios, key=ratios.__getitem__)] > 1 + STEADY:
        found = f"the line {fastest!r} is {ratios[fastest]:.2f}"
    else:
        return ""
    return f"This machine was busy: {found}. Do not compare speeds by this run; run this load again on a quiet machine."


def _rounds(outcome: Outcome, engine: Outcome) -> str:
    """The least and the largest ratio of a round, if there are several: to the mean of the engine's runs in it."""
    rounds = len(outcome.runs)
    if rounds < 2:
        return ""
    turns = len(engine.runs) // rounds
    means = [
        statistics.fmean(run["output_tokens_per_s"] for run in engine.runs[place * turns : (place + 1) * turns])
        for place in range(rounds)
    ]
    ratios = [run["output_tokens_per_s"] / mean for run, mean in zip(outcome.runs, means, strict=True)]
    return f"   rounds {min(ratios):.2f} to {max(ratios):.2f}"
