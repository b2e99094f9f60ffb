"""Run lessons' sources, with solutions, as plain scripts on this machine's tier, and record their output.

    python -m minillm.course.making.run 00 01 --json lessons

Needs no Jupyter: a source is a Python script.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from minillm.bench import records

NOTEBOOKS = Path(__file__).resolve().parents[3] / "notebooks"
SOURCES = NOTEBOOKS / "source"
SOLUTIONS = NOTEBOOKS / "solutions"  # where scripts run: lesson 99 reads the other lessons' notebooks there


def run(source: Path) -> dict:
    """Run a script in its own process: {"lesson", "ok", "seconds", "output", "errors"}, texts as lists of lines."""
    begin = time.perf_counter()
    environment = os.environ | {"MPLBACKEND": "agg"}
    done = subprocess.run([sys.executable, source], cwd=SOLUTIONS, env=environment, capture_output=True, text=True)
    errors = done.stderr.splitlines() if done.returncode else []
    return {
        "lesson": source.stem,
        "ok": done.returncode == 0,
        "seconds": round(time.perf_counter() - begin, 1),
        "output": done.stdout.splitlines(),
        "errors": errors,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minillm.course.making.run", description=__doc__)
    parser.add_argument("names", nargs="*", help="first characters of lessons' names; default: all")
    parser.add_argument("--json", type=Path, help="write the record there; a name without suffix: to data/results/")
    options = parser.parse_args(arguments)
    begun, results = records.begin(options.json), []
    for source in sorted(SOURCES.glob("*.py")):
        if not options.names or source.stem.startswith(tuple(options.names)):
            results.append(run(source))
            said = "ok" if results[-1]["ok"] else "FAILED\n" + "\n".join(results[-1]["errors"][-20:])
            print(f"{source.stem}  {results[-1]['seconds']} s  {said}", flush=True)
            if options.json is not None:  # after each lesson, so that a run that is cut short keeps what it has
                records.write(records.record(results, begun), options.json)
    return 0 if results and all(each["ok"] for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
