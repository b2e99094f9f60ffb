"""Setup for all tests, including those in notebooks."""

import copy
import gc
import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

# No test needs the network: an attempt to use it must fail at once instead of waiting.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A proxy would also intercept requests to servers on this machine.
for name in ("http_proxy", "https_proxy", "all_proxy"):
    os.environ.pop(name, None)
    os.environ.pop(name.upper(), None)
# Without bytecode on disk, each of the processes that tests start compiles the engine again: half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# The committed outputs of the lessons come from the embedded model.
os.environ["MINILLM_TIER"] = "cpu"

FULL_COLLECTION = 100  # collections of younger garbage before all objects are visited; Python has 10
MOST_PROCESSES = 8  # each takes up to 1.5 GB of memory
MESSAGE_SECONDS = 600  # nbval's default of 5 s per message is too short on a busy machine
EVALUATE = (  # lessons that run many quantized models over much text
    "05_quantizing_weights",
    "06_awq_and_gptq",
    "07_quantizing_activations",
    "08_quantizing_the_cache_and_choosing",
)
LONG_LESSONS = (
    *EVALUATE,
    "00_start_here",
    "10_inflight_batching",
    "13_speculative_decoding",
    "14_several_gpus",
    "15_adapters_and_other_prompts",
    "99_serve_and_benchmark",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: a process for each core; on a GPU one, since an engine takes most of its memory."""
    import torch

    if torch.cuda.is_available():
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_PROCESSES)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without a GPU, do not collect the tests that need one: hundreds of skips would hide others. Named files are."""
    if not collection_path.match("tests/*/test_*_on_gpu*.py"):
        return None
    import torch

    return None if torch.cuda.is_available() else True


def is_cell(item: pytest.Item) -> bool:
    """Whether this test is a notebook cell run by nbval."""
    return type(item).__name__ == "IPyNbCell"


DECIMAL = re.compile(r"\d+\.\d+")


def same_numbers(printed: str, committed: str) -> bool:
    """Whether two texts are equal but for the last digit of numbers with a decimal point.

    Another processor adds floats in another order, so a mean over many rows that one machine prints as 0.05896 may be
    0.05895 on the next. Numbers without a point are exact.
    """
    if DECIMAL.sub("", printed) != DECIMAL.sub("", committed):
        return False
    pairs = zip(DECIMAL.findall(printed), DECIMAL.findall(committed), strict=True)
    return all(_last_digits_apart(one, other) <= 1 for one, other in pairs)


def _last_digits_apart(one: str, other: str) -> float:
    if len(one.partition(".")[2]) != len(other.partition(".")[2]):
        return float("inf")
    return abs(int(one.replace(".", "")) - int(other.replace(".", "")))


def compare_outputs(item: pytest.Item, outputs: list[dict], committed: list[dict], skip: Any = None) -> bool:
    """nbval's comparison of a cell's outputs, where printed text may differ as `same_numbers` says."""
    outputs = copy.deepcopy(outputs)
    printed, expected = ([each for each in of if each.get("name") == "stdout"] for of in (outputs, committed))
    for output, reference in zip(printed, expected, strict=False):
        if same_numbers(output["text"], reference["text"]):
            output["text"] = reference["text"]
    return type(item).compare_outputs(item, outputs, committed, skip)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session):
    """Collect tests without collecting garbage: visits to all modules and tests so far are a third of the work."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # they stay, and so do most modules that tests import later: a visit to these takes half a second
        gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
            items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    for item in filter(is_cell, items):
        item.output_timeout = MESSAGE_SECONDS
        if item.path.stem in EVALUATE:
            item.compare_outputs = partial(compare_outputs, item)
        # Warnings and progress bars differ between machines; only stdout is part of the lesson.
        item.parent.skip_compare = (*item.parent.skip_compare, "stderr")
        # Solutions differ from the learners' notebooks in the exercises only.
        if item.path.parent.name == "solutions" or item.path.stem in LONG_LESSONS:
            item.add_marker(pytest.mark.proof)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that would begin after MINILLM_TESTS_UNTIL, in seconds since 1970: continuous integration sets it."""
    if time.time() > float(os.environ.get("MINILLM_TESTS_UNTIL", "inf")):
        pytest.skip("not run: the time for all tests is up")
    if is_cell(item) and getattr(item.parent, "broken", False):
        pytest.skip("an earlier cell of this notebook failed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if is_cell(item) and report.failed:
        item.parent.broken = True
    return report
