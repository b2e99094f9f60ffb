"""Choose what a report measures, and how much of it."""

import importlib.util
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from minillm.errors import ConfigError, MissingPackage
from minillm.evaluate import tasks
from minillm.folders import how_to_install
from minillm.model.loader import EMBEDDED
from minillm.values import shown

QUICK_SPEED = 2000.0  # prompt tokens per second; a slower CPU measures less in a quick report
LONGEST = 2560  # tokens of a request of the longest query pattern, lilo, at scale 1
WORKLOADS = ("single", "mixed")  # one request, and many at once
BF16 = "bf16"  # the version whose weights and arithmetic are in bfloat16
# What each package is needed for; the extra `report` installs all of them.
NEEDED = {
    "datasets": "questions",
    "fastapi": "the server",
    "uvicorn": "the server",
    "prometheus_client": "the server",
    "aiohttp": "the load generator",
    "matplotlib": "pictures",
    "latex2mathml": "formulas",
}


@dataclass(frozen=True)
class ReportSettings:
    """The extent of the measurements.

    versions  names as `minillm eval --compare` takes; None: all methods that fit the model
    task      whose questions are asked, as `minillm eval --tasks` takes
    limit     most questions; None: all
    tokens    tokens of the held-out text; None: all
    scale     lengths of the workloads are divided by it
    requests  of the offline workload with many requests
    repeat    timed runs of each offline workload
    clients   of the server, each with one request at a time
    sent      requests of each query pattern
    served    versions that are served; None: the unquantized one
    price     dollars for an hour of the machine, or of its GPU; None: unknown
    """

    versions: tuple[str, ...] | None
    task: str
    limit: int | None
    tokens: int | None
    scale: int
    requests: int
    repeat: int
    clients: int
    sent: int
    served: tuple[str, ...] | None = None
    price: float | None = None
    quick: bool = False


def settle(
    source: Path,
    context: int,
    *,
    gpu: bool,
    quick: bool = False,
    speed: float | None = None,
    versions: Sequence[str] = (),
    task: str | None = None,
    limit: int | None = None,
    scale: int | None = None,
    requests: int | None = None,
    served: Sequence[str] = (),
    price: float | None = None,
) -> ReportSettings:
    """Return the settings for a model and a device; what is given replaces the default.

    context: tokens that the model reads at most. speed: prompt tokens it reads per second here: a quick report of a
    slow model asks fewer questions, reads less text and sends fewer requests, so that it ends in about ten minutes.
    requests: of both the offline and the serving workloads.
    Raises ConfigError.
    """
    least = math.ceil(LONGEST / (context - 1))
    scale = max(least, 1 if gpu else 16 if quick else 8) if scale is None else scale
    if scale < least:
        raise ConfigError(
            f"--scale {scale} makes requests of {LONGEST // max(1, scale):,} tokens, and the context has {context:,}: "
            f"give {least} or more"
        )
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise ConfigError(f"--gpu-price must be a number of dollars from 0, not {shown(price)}")
    if requests is not None and requests < 1:
        raise ConfigError(f"--requests must be a whole number from 1, not {shown(requests)}")
    if task is None:
        task = "mmlu" if source != EMBEDDED and tasks.mmlu_is_here() else "isles"
    if not versions and quick:
        versions = ("int8", "int4", "fp8" if gpu else "w8a8")
    share = 1.0 if speed is None or not quick else min(1.0, speed / QUICK_SPEED)

    def less(usual: int, least: int) -> int:
        return max(least, round(usual * share))

    many = {(True, True): 256, (True, False): 16, (False, True): 1024, (False, False): 64}[quick, gpu]
    sent = {(True, True): 128, (True, False): 12, (False, True): 512, (False, False): 64}[quick, gpu]
    return ReportSettings(
        versions=tuple(dict.fromkeys(versions)) or None,
        task=task,
        limit=(less(100, 20) if quick else None) if limit is None else limit,
        tokens=less(4096, 512) if quick else None,
        scale=scale,
        requests=less(many, 4) if requests is None else requests,
        repeat=3 if quick else 5,
        clients=64 if gpu else 4 if quick else 8,
        sent=less(sent, 4) if requests is None else requests,
        served=tuple(dict.fromkeys(served)) or None,
        price=price,
        quick=quick,
    )


def check_packages(names: Iterable[str] = NEEDED) -> None:
    """Raise MissingPackage unless all packages that a report needs are installed."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        why = ", ".join(f"{name} ({NEEDED[name]})" for name in missing)
        how = how_to_install("minillm[report]")
        raise MissingPackage(f"a report needs packages that are not installed: {why}. To install them: {how}")
