"""Kernels compile for every GPU generation since Ampere, even without a GPU, and fit its shared memory."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed here")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.proof


@pytest.fixture(scope="module", params=["80", "86", "89", "90"])
def compiled(request, tmp_path_factory) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))  # an empty cache forces compilation
    script = [sys.executable, ROOT / "tools" / "compile_kernels.py", request.param]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {needs["capability"] for needs in found} == {int(request.param)}
    return found


def test_every_kernel_fits_into_shared_memory(compiled):
    too_large = [needs for needs in compiled if needs["shared"] > needs["limit"]]
    assert not too_large


def test_every_kernel_is_compiled(compiled):
    in_source = set()
    for path in (ROOT / "kernels").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                in_source.add(node.name)
    lacking = {"fp8_rows_kernel"} if compiled[0]["capability"] < 89 else set()  # no products of FP8 numbers there
    assert {needs["kernel"] for needs in compiled} == in_source - lacking


def test_a_norm_adds_up_squares_in_one_order_whatever_it_writes(compiled):
    """A thread with other columns, for the sake of stores of codes, would exchange the row's sum in shared memory."""
    needs = [each for each in compiled if each["kernel"] == "add_rms_norm_kernel"]
    assert len(needs) > 1 and len({(each["shared"], each["warps"]) for each in needs}) == 1


def test_an_engine_does_not_find_in_tritons_cache_what_cannot_be_launched():
    code = """
import runpy, sys
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
tool, target = runpy.run_path(sys.argv[1]), GPUTarget("cuda", 90, 32)
assert CUDABackend(target).hash() == CUDABackend(target).hash() != tool["NoAssembly"](target).hash()
"""
    command = [sys.executable, "-c", code, ROOT / "tools" / "compile_kernels.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
