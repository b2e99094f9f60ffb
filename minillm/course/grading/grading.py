"""Check the notebooks that learners handed in: which exercises each learner solved, and which property is missing.

    minillm course grade handed_in

Every exercise is checked in a process of its own (`judge.py`), in a copy of the package without notebooks, so that no
notebook stops the grading of the others. docs/grading.md says what this protects from, and what it does not.
"""

import json
import os
import queue
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import nbformat
import psutil

from minillm.errors import ConfigError, MinillmError
from minillm.folders import LINKED, LINKS, PACKAGE

UNREADABLE = "cannot be read"
MOST_BYTES = 32 << 20  # of a notebook: a lesson with its pictures has one or two million
START_SECONDS = 300.0  # in which a judge must be ready: it imports torch
GRACE_SECONDS = 60.0  # after an exercise's limit, in which the judge must answer
KEPT_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT")
STARTED = "import sys; sys.path[:0] = sys.argv[1:2]; sys.path += sys.argv[2:]; "
STARTED += "from minillm.course.grading import judge; judge.main()"


@dataclass(frozen=True)
class Outcome:
    """The result of one exercise of one notebook.

    status: one of judge.STATUSES or UNREADABLE. property: the first that does not hold. said: what the checker says of
    it, with its hint, or what went wrong. held, of: numbers of properties. notes: names in the code that no exercise
    needs.
    """

    status: str
    property: str = ""
    said: str = ""
    held: int = 0
    of: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graded:
    """A notebook's outcomes by exercise, in the order of its lesson. problem: why it could not be graded, or ""."""

    path: Path
    learner: str
    lesson: str
    outcomes: dict[str, Outcome]
    problem: str = ""


@dataclass(frozen=True)
class Limits:
    """seconds, memory_gb: of one exercise. Raises ConfigError."""

    seconds: float = 120.0
    memory_gb: float = 4.0

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 86_400:
            raise ConfigError(f"--time-limit must be more than 0 and at most 86,400 seconds, not {self.seconds:g}")
        if not 1 <= self.memory_gb <= 1024:
            raise ConfigError(f"--memory-gb must be 1 to 1024 (a checker itself needs about 1), not {self.memory_gb:g}")


class JudgeDied(MinillmError, RuntimeError):
    """The process that checks submissions ended, does not answer, or can no longer be relied on."""


class Judge:
    """A process that checks one submission at a time, on its own copy of the package; `exercises` has their lessons.

    Raises JudgeDied if it does not start.
    """

    def __init__(self) -> None:
        libraries = [each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
        self._home = tempfile.mkdtemp(prefix="minillm-grade-")
        self._tree = Path(self._home) / "tree"
        shutil.copytree(PACKAGE, self._tree / "minillm")
        for name in () if LINKED else LINKS:
            (self._tree / "minillm" / name).unlink()
            shutil.copytree(PACKAGE.parent / name, self._tree / "minillm" / name)
        self._channel, others = socket.socketpair()
        with others:
            self._process = subprocess.Popen(
                # -S: an editable installation would put the repository, with its solutions, on the path.
                [sys.executable, "-I", "-S", "-B", "-c", STARTED, str(self._tree), *libraries],
                cwd=self._home,
                env=_environment(self._home),
                stdin=others.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        self._text = b""
        try:
            self.exercises: dict[str, str] = self._answer(START_SECONDS)["exercises"]
            self._signature = _signature(self._tree)
        except JudgeDied:
            said = self.close()
            raise JudgeDied(f"the process that checks submissions did not start: {said.strip()[-500:]}") from None

    def check(self, exercise: str, cells: Sequence[str], limits: Limits) -> Outcome:
        """Check what cells of code have for an exercise. Raises JudgeDied."""
        folder = tempfile.mkdtemp(dir=self._home)
        request: dict[str, object] = {"exercise": exercise, "cells": list(cells), "folder": folder}
        request |= {"seconds": limits.seconds, "memory_gb": limits.memory_gb}
        try:
            self._channel.settimeout(GRACE_SECONDS)
            self._channel.sendall(json.dumps(request).encode() + b"\n")
        except OSError:  # closed, or full because the judge does not read
            raise JudgeDied("the process that checks submissions has ended") from None
        found = self._answer(limits.seconds + GRACE_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
        if _signature(self._tree) != self._signature:  # modules that no check has needed so far would be read from it
            raise JudgeDied("it changed the files of the checkers")
        return Outcome(**found | {"notes": tuple(found["notes"])})

    def _answer(self, seconds: float) -> dict:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._text:
            try:
                self._channel.settimeout(max(0.01, deadline - time.monotonic()))
                more = self._channel.recv(1 << 16)
            except TimeoutError:
                raise JudgeDied(f"the process that checks submissions did not answer in {seconds:g} seconds") from None
            except ConnectionError:
                more = b""
            if not more:
                raise JudgeDied("the process that checks submissions has ended")
            self._text += more
        line, _, self._text = self._text.partition(b"\n")
        return json.loads(line)

    def close(self) -> str:
        """End the process and all below it, remove its folder, and return what it wrote to stderr while it started."""
        try:
            below = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            below = []
        self._process.kill()
        for each in below:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait()
        assert self._process.stderr is not None
        said = os.read(self._process.stderr.fileno(), 1 << 16) if _readable(self._process.stderr) else b""
        self._process.stderr.close()
        self._channel.close()
        shutil.rmtree(self._home, ignore_errors=True)
        return said.decode(errors="replace").strip()


def _readable(stream: IO[bytes]) -> bool:
    return bool(select.select([stream], [], [], 0)[0])


def _environment(home: str) -> dict[str, str]:
    """A judge's environment: no tokens, proxies or paths of the user. On a CPU, so that a GPU's memory is no limit."""
    kept = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
    own = {"HOME": home, "TMPDIR": home, "MINILLM_TIER": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return kept | own | {"MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Judges:
    """`count` judges at most, each for one caller at a time. One that dies is replaced."""

    def __init__(self, count: int):
        self._free: queue.SimpleQueue[Judge | None] = queue.SimpleQueue()
        first = Judge()
        self.exercises = first.exercises
        for judge in [first, *[None] * (count - 1)]:
            self._free.put(judge)

    def check(self, exercise: str, cells: Sequence[str], limits: Limits) -> Outcome:
        """Check what cells of code have for an exercise, whatever they do to the judge."""
        judge = self._free.get()
        try:
            judge = judge or Judge()
            return judge.check(exercise, cells, limits)
        except JudgeDied as error:
            if judge is not None:
                judge.close()
            judge = None
            return Outcome("error", said=f"not checked: {error}")
        finally:
            self._free.put(judge)

    def close(self) -> None:
        """End all judges."""
        while not self._free.empty():
            if (judge := self._free.get()) is not None:
                judge.close()


def _signature(tree: Path) -> int:
    """A number that changes with each file that is written, added or removed: the time of such a change is not ours."""
    found = []
    for folder, _, names in os.walk(tree):
        for name in names:
            state = os.lstat(os.path.join(folder, name))
            found.append((folder, name, state.st_size, state.st_ctime_ns))
    return hash(tuple(sorted(found)))


# ---- a folder of notebooks


def grade(
    folder: Path,
    limits: Limits | None = None,
    jobs: int = 1,
    said: Callable[[str], None] = lambda line: None,
    learner: str | None = None,
) -> list[Graded]:
    """Grade all notebooks below a folder, in the order of learners and lessons.

    jobs: how many exercises are checked at once. said: gets a line for each notebook. learner: a regular expression
    whose first group is the learner in a file's name. Raises ConfigError if there is no notebook, and on Windows.
    """
    pattern = _pattern(learner)
    paths = notebooks(folder)
    if not hasattr(os, "fork"):
        raise ConfigError("grading needs Linux or macOS, to confine the code that it runs: on Windows, use WSL")
    judges = Judges(jobs)
    lessons: dict[str, list[str]] = {}
    for name, lesson in judges.exercises.items():
        lessons.setdefault(lesson, []).append(name)

    def work(path: Path) -> list[Graded]:
        whose = learner_of(path, folder, pattern)
        found = _grade(path, whose, lessons, lambda name, cells: judges.check(name, cells, limits or Limits()))
        for each in found:
            said(_line(each, folder))
        return found

    try:
        with warnings.catch_warnings(), ThreadPoolExecutor(jobs) as pool:
            warnings.simplefilter("ignore")  # nbformat has one for each cell that was copied with its id
            graded = [each for found in pool.map(work, paths) for each in found]
    finally:
        judges.close()
    for empty in _without_notebooks(folder, paths):
        graded.append(Graded(empty, unicodedata.normalize("NFC", empty.name), "", {}, "no notebook (*.ipynb) in it"))
        said(_line(graded[-1], folder))
    return sorted(graded, key=lambda each: (each.learner.lower(), each.lesson, each.path))


def notebooks(folder: Path) -> list[Path]:
    """The notebooks below a folder, without JupyterLab's own copies. Raises ConfigError if there are none."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: name the one with the notebooks that learners handed in")
    every = [path for path in folder.rglob("*") if path.suffix.lower() == ".ipynb"]
    found = [path for path in every if not any(part.startswith(".") for part in _inside(path, folder))]
    if not found:
        raise ConfigError(f"no notebook (*.ipynb) in {folder} or below: name the folder with what learners handed in")
    return sorted(found)


def _without_notebooks(folder: Path, paths: Sequence[Path]) -> list[Path]:
    """The learners' subfolders that have no notebook, if all notebooks are in subfolders."""
    if any(path.parent == folder for path in paths):
        return []
    having = {_inside(path, folder)[0] for path in paths}
    subfolders = [each for each in sorted(folder.iterdir()) if each.is_dir() and not each.name.startswith((".", "__"))]
    return [each for each in subfolders if each.name not in having]


def _inside(path: Path, folder: Path) -> tuple[str, ...]:
    return path.relative_to(folder).parts


def _grade(path: Path, learner: str, lessons: dict[str, list[str]], check: Callable) -> list[Graded]:
    """The outcomes of a notebook's lesson, then those of other lessons' exercises that it defines, too."""
    cells, problem = read(path)
    lesson = lesson_of(path, cells, lessons)
    if not problem and not lesson:
        numbers = ", ".join(lessons)
        problem = f"no lesson recognized: it defines no exercise, and no title or file name has one of {numbers}"
    if problem:
        unreadable = dict.fromkeys(lessons.get(lesson, ()), Outcome(UNREADABLE))
        return [Graded(path, learner, lesson, unreadable, problem)]
    code = [source for kind, source in cells if kind == "code"]
    defined = _defined(cells)
    wanted = {lesson: lessons[lesson]}
    wanted |= {
        other: found
        for other, names in lessons.items()
        if other != lesson and (found := [name for name in names if name in defined])
    }
    return [Graded(path, learner, each, {name: check(name, code) for name in names}) for each, names in wanted.items()]


def read(path: Path) -> tuple[list[tuple[str, str]], str]:
    """(kind, source) of a notebook's cells, and why it could not be read, or ""."""
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            most = f"{MOST_BYTES >> 20} MiB"
            return [], f"too large: {size / (1 << 20):,.0f} MiB, the limit is {most}; clear its outputs and save it"
        cells = nbformat.read(path, as_version=4).cells
        found = [(str(cell.cell_type), str(cell.source)) for cell in cells]
    except Exception as error:  # nbformat raises many kinds
        said = str(error).strip().split("\n")[0][:200]
        return [], f"not a notebook that can be read ({type(error).__name__}: {said}): hand it in again"
    return found, ""


def lesson_of(path: Path, cells: Sequence[tuple[str, str]], lessons: dict[str, list[str]]) -> str:
    """The number of a notebook's lesson: by the exercises that it defines, its title or its file's name; else ""."""
    defined = _defined(cells)
    counts = {lesson: len(defined.intersection(names)) for lesson, names in lessons.items()}
    titles = re.findall(r"^# (\d\d) · ", cells[0][1], re.MULTILINE) if cells else []
    named = re.findall(r"(?<!\d)(\d\d)(?!\d)", path.stem)
    certain = [number for number in (*titles, *named) if number in lessons]
    best = max(counts, key=lambda lesson: (counts[lesson], lesson in certain))
    if counts[best]:
        return best
    return certain[0] if certain else ""


def _defined(cells: Sequence[tuple[str, str]]) -> set[str]:
    """The functions and classes at the top level of a notebook's cells."""
    text = "\n".join(source for kind, source in cells if kind == "code")
    return set(re.findall(r"^(?:def|class) (\w+)", text, re.MULTILINE))


def _pattern(learner: str | None) -> re.Pattern | None:
    try:
        found = None if learner is None else re.compile(learner)
    except re.error as error:
        raise ConfigError(f"--learner is not a regular expression: {error}") from None
    if found is not None and found.groups != 1:
        raise ConfigError(f"--learner must have one group, as '^([a-z]+)_', and {learner!r} has {found.groups}")
    return found


def learner_of(path: Path, folder: Path, pattern: re.Pattern | None = None) -> str:
    """Return whose a notebook is: the subfolder's name, or the file's without the lesson's (00_start_here_anna: anna).

    pattern: its group in the file's name is the learner. Copies that a browser or JupyterLab has numbered, as in
    `anna-Copy1` and `anna (1)`, are anna's too, and letters may be written in either of Unicode's forms.
    """
    inside, stem = _inside(path, folder), unicodedata.normalize("NFC", path.stem)
    if pattern is not None and (match := pattern.search(stem)) and match[1]:
        return match[1]
    if len(inside) > 1:
        return unicodedata.normalize("NFC", inside[0])
    known = sorted(each.stem for each in (PACKAGE.parent / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    stem = re.sub(r"(-Copy\d*|-\d+|\s*\(\d+\))+$", "", stem)
    for lesson in known:
        stem = re.sub(rf"(^|[^0-9A-Za-z]){lesson}([^0-9A-Za-z]|$)", " ", stem)
    return stem.strip(" _-.()") or folder.resolve().name  # one learner's own folder


def _line(graded: Graded, folder: Path) -> str:
    name = "/".join(_inside(graded.path, folder))
    if graded.problem:
        return f"{name}: {graded.problem}"
    outcomes = "; ".join(f"{name} {outcome.status}" for name, outcome in graded.outcomes.items())
    return f"{name}: {outcomes}"
