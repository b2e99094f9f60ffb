"""Kernels are interpreted where there is no GPU; Triton must have been told before its first import."""

import sys

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed here: the references run instead")


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels of this process can run."""
    from minillm.kernels import normalization

    compiled = isinstance(normalization.rms_norm_kernel, triton.runtime.JITFunction)
    if compiled and not torch.cuda.is_available():
        pytest.fail(
            "triton was imported before TRITON_INTERPRET=1 was set (tests/conftest.py sets it), and there is no GPU; "
            f"run `pytest tests/kernels` alone (transformers imported: {'transformers' in sys.modules})"
        )
    return "cuda" if compiled else "cpu"
