"""Fixtures of the kernel tests. Without a GPU, kernels are interpreted (see tests/conftest.py)."""

import sys
import zlib

import pytest
import torch

from tests.chance import SEED

triton = pytest.importorskip("triton", reason="triton is not installed here: the references run instead")


@pytest.fixture(scope="session")
def device() -> str:
    """The device that kernels of this process run on."""
    from minillm.kernels import normalization

    compiled = isinstance(normalization.rms_norm_kernel, triton.runtime.JITFunction)
    if compiled and not torch.cuda.is_available():
        pytest.fail(
            "triton was imported before TRITON_INTERPRET=1 was set (tests/conftest.py sets it), and there is no GPU; "
            f"run `pytest tests/kernels` alone (transformers imported: {'transformers' in sys.modules})"
        )
    return "cuda" if compiled else "cpu"


@pytest.fixture(autouse=True)
def fresh_inputs(request):
    """Inputs depend only on the test, not on what ran before it."""
    torch.manual_seed(zlib.crc32(f"{SEED} {request.node.name}".encode()))


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Fill output memory with NaN, so that an element the kernel does not write is detected."""

    def poisoned(make):
        def maker(*args, **kwargs):
            tensor = make(*args, **kwargs)
            lowest = None if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
            return tensor.fill_(float("nan") if lowest is None else lowest // 2)

        return maker

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
