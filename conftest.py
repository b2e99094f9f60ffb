"""Setup for all tests, including those in notebooks."""

import os

import pytest

# No test needs the network: an attempt to use it must fail at once instead of waiting.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A proxy would also intercept requests to servers on this machine.
for name in ("http_proxy", "https_proxy", "all_proxy"):
    os.environ.pop(name, None)
    os.environ.pop(name.upper(), None)
# The committed outputs of the lessons come from the embedded model.
os.environ["MINILLM_TIER"] = "cpu"

MESSAGE_SECONDS = 600  # nbval's default of 5 s per message is too short on a busy machine


def is_cell(item: pytest.Item) -> bool:
    """Whether this test is a notebook cell run by nbval."""
    return type(item).__name__ == "IPyNbCell"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in filter(is_cell, items):
        item.output_timeout = MESSAGE_SECONDS
        # Warnings and progress bars differ between machines; only stdout is part of the lesson.
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
