"""Setup for all tests in this folder; runs before any test module is imported."""

import logging
import os
import random
import socket
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from minillm.course.shared.hasten import hasten
from tests import chance

# Triton decides at its first import whether to interpret kernels, and transformers imports it. Without a GPU, kernels
# can only run interpreted, so this slows nothing down.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):  # which exists for Linux only
    hasten()

# The last bits of a sum depend on the number of threads that compute it.
torch.set_num_threads(1)

# A slow example is not a failure: the machine may be busy.
EVERYWHERE = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, **EVERYWHERE)
settings.register_profile("explore", derandomize=False, print_blob=True, **EVERYWHERE)
settings.load_profile(chance.PROFILE)
# Hypothesis draws on constants of the modules imported so far, so examples would depend on which tests ran before.
providers._get_local_constants = lambda: providers._local_constants


def pytest_report_header() -> str:
    if chance.GIVEN is None:
        return "random: fixed seeds; `make explore` draws others"
    return f"random: repeat with make explore SEED={chance.SEED} EXAMPLES={chance.TIMES}"


@pytest.fixture
def dead_url() -> Iterator[str]:
    """The URL of a port that is reserved but has no listener."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def global_state() -> dict:
    ours = ("MINILLM_", "HF_", "TRITON_")  # libraries set others when they are first imported
    variables = {f"${name}": value for name, value in os.environ.items() if name.startswith(ours)}
    return variables | {
        "working directory": os.getcwd(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "gradients": torch.is_grad_enabled(),
    }


@pytest.fixture(autouse=True)
def isolated_state():
    """Each test starts from the same random state and must leave global state unchanged."""
    random.seed(chance.SEED)
    np.random.seed(chance.SEED)
    torch.default_generator.manual_seed(chance.SEED)
    if torch.cuda.is_available():  # else torch.manual_seed would note the call and its stack for a GPU to come
        torch.cuda.manual_seed_all(chance.SEED)
    before, log = global_state(), logging.getLogger("minillm")
    handlers, level = log.handlers, log.level
    yield
    log.handlers = handlers  # a command's log goes to the terminal that its test captures
    log.setLevel(level)
    left = global_state().items() ^ before.items()
    assert not left
