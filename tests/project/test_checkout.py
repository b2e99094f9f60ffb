"""A checkout without symbolic links, as git makes it on Windows by default, works like any other."""

import shutil
import subprocess
import sys
from pathlib import Path

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


def outputs(folder: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_kernels_and_data_are_found_without_symbolic_links(tmp_path):
    shutil.copytree(ROOT / "minillm", tmp_path / "minillm", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("kernels", "data"):
        (tmp_path / "minillm" / name).unlink()
        (tmp_path / "minillm" / name).write_text(f"../{name}")
        (tmp_path / name).symlink_to(ROOT / name)
    linked, found = outputs(ROOT), outputs(tmp_path)
    assert found[0] == linked[0] and linked[0].endswith("True")
    assert found[1] in ("True", "no triton")
