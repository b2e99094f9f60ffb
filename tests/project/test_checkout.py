"""A checkout without symbolic links, as git makes it on Windows by default, works like any other."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.course.making.export import FOLDERS, export
from minillm.folders import LINKED

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from pathlib import Path
import minillm
from minillm import LLM, SamplingParams
from minillm.bench import records
assert Path(minillm.__file__).is_relative_to(Path.cwd()), minillm.__file__
with LLM(num_blocks=16) as llm:
    (done,) = llm.generate(["The river"], SamplingParams(max_tokens=4, temperature=0))
print(done.token_ids, (records.RESULTS / "cpu" / "offline.json").is_file())
try:
    import triton
except ImportError:
    print("no triton")
else:
    from minillm.kernels import launch_configs, paged_attention
    print(paged_attention.__file__ == str(Path.cwd() / "kernels" / "paged_attention.py"))
"""


COURSE = """
from minillm.course import doctor
from minillm.course.grading.grading import Judge
print(*(each.found for each in doctor.examine() if each.name in ("checkout", "package")))
judge = Judge()
print(len(judge.exercises) > 30)
judge.close()
"""


def outputs(folder: Path, code: str = CODE) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def without_links(tmp_path_factory) -> Path:
    tmp_path = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "minillm", tmp_path / "minillm", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("kernels", "data"):
        (tmp_path / "minillm" / name).unlink()
        (tmp_path / "minillm" / name).write_text(f"../{name}")
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_kernels_and_data_are_found_without_symbolic_links(without_links):
    linked, found = outputs(ROOT), outputs(without_links)
    assert found[0] == linked[0] and linked[0].endswith("True")
    assert found[1] in ("True", "no triton")


@pytest.mark.proof
def test_the_doctor_says_so_and_notebooks_are_graded(without_links):
    said, graded = outputs(without_links, COURSE)
    assert said.startswith("without symbolic links") and graded == "True"
    if LINKED:
        assert outputs(ROOT, COURSE) == ["", "True"]


def test_a_learners_copy_of_it_has_links(tmp_path):
    root, copy = tmp_path / "root", tmp_path / "copy"
    for name in (*FOLDERS, "notebooks/clean"):
        (root / name).mkdir(parents=True)
    for name in ("Makefile", "notebooks/00_start.ipynb", "kernels/one.py", "data/two.txt"):
        (root / name).touch()
    for name in ("kernels", "data"):
        (root / "minillm" / name).write_text(f"../{name}")
    export(copy, root)
    assert (copy / "minillm" / "kernels" / "one.py").is_file() and (copy / "minillm" / "data" / "two.txt").is_file()
