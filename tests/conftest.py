"""What holds for every test here: set before any test module is imported."""

import os
import random
import socket
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests import chance

# Triton decides when it is first imported whether kernels are interpreted, and transformers imports it on the way.
# Without a GPU interpreting is the only way to run a kernel, so nothing that could run otherwise is slowed down.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How many threads add a row up decides the last bits of its sum.
torch.set_num_threads(1)

# No example is too slow: a busy machine is no fault of a test's.
EVERYWHERE = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, **EVERYWHERE)
settings.register_profile("explore", derandomize=False, print_blob=True, **EVERYWHERE)
settings.load_profile(chance.PROFILE)
# Hypothesis tries constants of the modules imported so far, and so other examples after other tests.
providers._get_local_constants = lambda: providers._local_constants


def pytest_report_header() -> str:
    if chance.GIVEN is None:
        return "random: fixed seeds; `make explore` draws others"
    return f"random: repeat with make explore SEED={chance.SEED} EXAMPLES={chance.TIMES}"


@pytest.fixture
def nobody() -> Iterator[str]:
    """The URL of a port that is taken, but where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def global_state() -> dict:
    ours = ("MINILLM_", "HF_", "TRITON_")  # libraries set some of their own when they are first imported
    variables = {f"${name}": value for name, value in os.environ.items() if name.startswith(ours)}
    return variables | {
        "current folder": os.getcwd(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's threads": torch.get_num_threads(),
        "precision of products": torch.get_float32_matmul_precision(),
        "gradients": torch.is_grad_enabled(),
    }


@pytest.fixture(autouse=True)
def nothing_leaks():
    """A test starts from the same random state, whatever ran before, and leaves the process as it found it."""
    random.seed(chance.SEED)
    np.random.seed(chance.SEED)
    torch.manual_seed(chance.SEED)
    before = global_state()
    yield
    left = global_state().items() ^ before.items()
    assert not left
