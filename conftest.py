"""What holds for every test, those inside notebooks among them."""

import os

import pytest

# No test needs the network: what would ask it must fail at once instead of waiting.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A proxy is for other machines, and would be asked for the servers of this one.
for name in ("http_proxy", "https_proxy", "all_proxy"):
    os.environ.pop(name, None)
    os.environ.pop(name.upper(), None)
# Kept outputs of lessons are those of the embedded model.
os.environ["MINILLM_TIER"] = "cpu"

MOST_PROCESSES = 8  # each takes up to a GB and a half of memory
MESSAGE_SECONDS = 600  # nbval waits 5 s for each message of a cell, less than a busy machine may need


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: a process for each core; on a GPU one, since an engine takes most of its memory."""
    import torch

    if torch.cuda.is_available():
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_PROCESSES)


def is_cell(item: pytest.Item) -> bool:
    """Whether nbval made this test, out of a notebook's cell."""
    return type(item).__name__ == "IPyNbCell"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in filter(is_cell, items):
        item.output_timeout = MESSAGE_SECONDS
        # Warnings and progress bars differ between machines; what a cell says on stdout is what it teaches.
        item.parent.skip_compare = (*item.parent.skip_compare, "stderr")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if is_cell(item) and getattr(item.parent, "broken", False):
        pytest.skip("an earlier cell of this notebook failed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if is_cell(item) and report.failed:
        item.parent.broken = True
    return report
