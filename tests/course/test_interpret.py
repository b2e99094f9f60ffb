"""Lessons choose interpreted or compiled kernels before triton is imported, and report it if that is too late."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minillm.course.interpret import surrounded, untouched

pytest.importorskip("triton", reason="triton is not installed here: it exists for Linux only")

ROOT = Path(__file__).resolve().parents[2]
KERNEL = """
import torch, triton, triton.language as tl
@triton.jit
def add_one(x_ptr):
    tl.store(x_ptr + tl.program_id(0), tl.load(x_ptr + tl.program_id(0)) + 1)
x = torch.zeros(3)
add_one[(3,)](x)
print(x.tolist())
"""


def run(tmp_path, code: str) -> subprocess.CompletedProcess:
    script = tmp_path / "lesson.py"  # triton reads a kernel's source from its file
    script.write_text(code, encoding="utf-8")
    # This process already sets TRITON_INTERPRET; a learner's does not.
    environment = {"PATH": "", "MINILLM_TIER": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)


def test_without_a_gpu_kernels_are_interpreted(tmp_path):
    code = "from minillm.course import triton_here\nprint(triton_here())\n" + KERNEL
    done = run(tmp_path, code)
    assert done.stdout == "interpreted\n[1.0, 1.0, 1.0]\n", done.stderr


def test_importing_triton_too_early_is_reported(tmp_path):
    done = run(tmp_path, "import triton\nfrom minillm.course import triton_here\ntriton_here()\n")
    assert "ConfigError: triton" in done.stderr
    assert "restart the kernel" in done.stderr


@pytest.mark.parametrize("at", [-1, 6])
def test_a_write_outside_a_tensor_is_detected(at):
    inside, memory = surrounded(torch.ones(2, 3), by=-5.0)
    assert inside.tolist() == [[1, 1, 1], [1, 1, 1]] and untouched(memory, by=-5.0)
    memory[inside.storage_offset() + at] = 1.0
    assert not untouched(memory, by=-5.0)
