"""Report on a model of `minillm models` with its original weights, and on what the packaged ones lost.

    python tools/original_weights.py smollm2-135m --quick

It downloads the original from the Hugging Face Hub. Options after the name are those of `minillm report`. The page is
written to NAME-original.html. If the packaged model is on this machine, `minillm eval --compare` then measures how far
its weights, which were rounded to four bits, are from the original's.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from minillm.pretrained import CATALOG, downloaded  # noqa: E402


def commands(name: str, more: list[str]) -> list[list[str]]:
    """What to run, as words after `minillm`. more: options of `minillm report`."""
    offer = CATALOG[name]
    found = [["report", offer.original, "--out", f"{name}-original.html", *more]]
    if packaged := downloaded(offer):
        found.append(["eval", "--compare", str(packaged), "--model", offer.original])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=CATALOG)
    given, more = parser.parse_known_args()
    for words in commands(given.model, more):
        print(f"minillm {shlex.join(words)}", flush=True)
        if code := subprocess.run([sys.executable, "-m", "minillm", *words], cwd=ROOT).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
