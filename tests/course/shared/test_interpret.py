"""Lessons choose interpreted or compiled kernels before triton is imported, and report it if that is too late."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minillm.course.shared.interpret import surrounded, untouched

pytest.importorskip("triton", reason="triton is not installed here: it exists for Linux only")

ROOT = Path(__file__).resolve().parents[3]
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


WATCHED = """
import torch, triton, triton.language as tl
from minillm.course.shared.interpret import strays
@triton.jit
def copy(x_ptr, out_ptr, SIZE, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    tl.store(out_ptr + at, tl.load(x_ptr + at), mask=at < SIZE + 1)
x, out = torch.ones(8)[:3], torch.zeros(8)[:3]
for junk in (False, True):
    with strays(x, out, junk=junk) as found:
        copy[(1,)](x, out, 3, TILE=4)
    print(out.tolist(), out._base[3].item(), dict(found), found.modules)
copy[(1,)](x, out, 3, TILE=4)
print(out._base.tolist())
@triton.jit
def endless(x_ptr):
    at = 0
    while at < 1:
        tl.store(x_ptr, tl.load(x_ptr))
try:
    with strays(x):
        endless[(1,)](x)
except Exception as error:
    print("never end" in str(error))
"""


SHARED = """
import torch, triton, triton.language as tl
from minillm.course.shared.interpret import strays
@triton.jit
def write(out_ptr, STEP, TILE: tl.constexpr):
    at = tl.program_id(0) * STEP + tl.arange(0, TILE)
    tl.store(out_ptr + at, 1.0)
    tl.store(out_ptr + at, 2.0)
out = torch.zeros(12)
for step in (4, 3):
    with strays(out) as found:
        write[(3,)](out, step, TILE=4)
    print(found.stored_by_several())
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the two programs print, one after another in one process: importing triton takes longer than both."""
    code = f"from minillm.course import triton_here\ntriton_here()\n{WATCHED}\nprint('next')\n{SHARED}"
    done = run(tmp_path_factory.mktemp("watched"), code)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("next\n")


def test_strays_are_counted_and_have_no_effect(printed):
    once = "[1.0, 1.0, 1.0] 0.0 {'loads': 1, 'stores': 1} ['__main__']\n"
    assert printed[0] == 2 * once + "[1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]\nTrue\n"


def test_elements_that_several_programs_store_are_counted(printed):
    assert printed[1] == "0\n2\n"


LOOKS = """
import sys, torch, triton, triton.language as tl
from triton.runtime import interpreter
from minillm.course.shared.hasten import hasten
looks, patch = 0, interpreter._patch_builtin
def counted(*given):
    global looks
    looks += 1
    patch(*given)
interpreter._patch_builtin = counted
if sys.argv[1:]:
    hasten()
@triton.jit
def inside(at, step):
    return (at * step + 3) % 7
@triton.jit
def kernel(x_ptr, low_ptr, STEPS):
    at = tl.arange(0, 8)
    total = tl.load(x_ptr + at)
    for step in range(STEPS):
        total += inside(at, step)
    tl.store(x_ptr + at, total * tl.max(total, axis=0) + tl.load(low_ptr + at).to(tl.float32).to(tl.int32))
for steps in (3, 30):
    looks, x = 0, torch.arange(8, dtype=torch.int32)
    kernel[(2,)](x, torch.full((8,), 1.5, dtype=torch.bfloat16), steps)
    print(steps, x.tolist(), file=sys.stderr)
    print(looks)
"""


def test_a_hastened_kernel_computes_the_same_and_looks_through_the_language_once(tmp_path):
    script = tmp_path / "kernels.py"
    script.write_text(LOOKS, encoding="utf-8")
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    command = [sys.executable, script]
    plain, hastened = (
        subprocess.run([*command, *more], capture_output=True, text=True, env=environment) for more in ([], ["hasten"])
    )
    assert len(plain.stderr.splitlines()) == 2 and plain.stderr == hastened.stderr
    (few, many), (first, second) = plain.stdout.split(), hastened.stdout.split()
    assert int(many) > 3 * int(few)
    assert int(first) >= int(second) > 0, "no more often for 30 calls than for 3"


INTERRUPTED = """
import torch, triton, triton.language as tl
from triton.runtime import interpreter
from minillm.course.shared.hasten import hasten
hasten()
@triton.jit
def double(x_ptr):
    at = tl.arange(0, 4)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * 2)
def partly(scope):
    scope._changes[:] = [each for each in scope._changes if each[0] is not tl]  # tl's own are restored last
    restore(scope)
    raise KeyboardInterrupt
restore, interpreter._LangPatchScope.restore = interpreter._LangPatchScope.restore, partly
try:
    double[(1,)](torch.ones(4))
except KeyboardInterrupt:
    interpreter._LangPatchScope.restore = restore
x = torch.ones(4)
double[(1,)](x)
print(x.tolist())
"""


def test_kernels_run_after_an_interrupt_of_the_interpreter(tmp_path):
    script = tmp_path / "kernels.py"
    script.write_text(INTERRUPTED, encoding="utf-8")
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.stdout == "[2.0, 2.0, 2.0, 2.0]\n", done.stderr
