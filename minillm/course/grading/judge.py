"""The process that checks what learners handed in; `grading.py` starts it in a folder without solutions.

It reads one request a line and answers each with one line of JSON. It never runs a learner's code itself: for each
exercise it forks a process that does, and ends that process and all that it started, by force if need be.

    {"exercise": "rms_norm", "cells": [...], "folder": "/tmp/...", "seconds": 120.0, "memory_gb": 4.0}
    {"status": "failed", "property": "each token on its own", "said": "...", "held": 3, "of": 9, "notes": []}

The process that runs the code checks it, too, because a checker passes it functions, tensors and kernels. So code that
is determined enough can forge its answer: see docs/grading.md.
"""

import copy
import ctypes
import functools
import json
import os
import resource
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any

import psutil

from minillm.errors import MissingPackage
from minillm.overrides import NotSolvedYet

from ..shared import checks, interpret
from . import submission

PASSED, FAILED, NOT_ATTEMPTED, ERROR, TIMED_OUT = STATUSES = (
    "passed",
    "failed",
    "not attempted",
    "error",
    "timed out",
)
NAME = "the notebook"  # in error messages
MOST_BYTES = 1 << 20  # of an answer
MOST_TEXT = 1000  # characters of what a checker says
FILE_BYTES = 256 << 20
MOST_PROCESSES = 64  # of a submission
THREADS = 512  # that the user's processes may have more than they have now
POLL_SECONDS, COUNT_SECONDS = 0.02, 0.25
SET_DEATH_SIGNAL, SET_DUMPABLE, SET_SUBREAPER = 1, 4, 36  # Linux: prctl
# Modules whose functions and classes a submission may not replace: checkers use them.
GUARDED = {"builtins", "copy", "dataclasses", "functools", "itertools", "json", "math", "operator", "random", "re"}
GUARDED |= {"signal", "time", "traceback", "types", "numpy", "numpy.linalg", "numpy.random", "torch", "torch._tensor"}
GUARDED |= {"torch.linalg", "torch.nn.functional", "torch.testing", "torch.testing._comparison"}
REPLACED = {"manual_seed"}  # by torch itself, when it first compiles something
OWN_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__gt__", "__bool__", "__torch_function__")


def main() -> None:
    """Say which exercises there are, then answer requests until stdin ends."""
    channel = socket.socket(fileno=os.dup(0))  # a pipe could be opened by others, as /proc/PID/fd/N
    requests, answers = channel.makefile("r"), channel.makefile("w")
    os.dup2(2, 1)
    _control(SET_DUMPABLE, 0)  # other processes of the user cannot open its pipes or read its memory
    _control(SET_SUBREAPER, 1)  # a submission's orphans become children of this process, which ends them
    with suppress(MissingPackage):  # a submission that needs it says so
        interpret.triton_here()
    exercises = checks.every()
    originals = Originals()

    def answer(content: dict) -> None:
        print(json.dumps(content), file=answers, flush=True)

    answer({"exercises": {name: _lesson(each) for name, each in exercises.items()}})
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what a submission prints goes nowhere, however much it is
        os.dup2(nowhere, stream)
    for line in requests:
        answer(_ask(json.loads(line), originals))


def _lesson(exercise: checks.Exercise) -> str:
    """The number of the lesson that an exercise belongs to, from its checker's module: lesson_09.checks_keys."""
    return exercise.properties[0].holds.__module__.rpartition(".lesson_")[2][:2]


def _control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# ---- this process: start, wait, end


def _ask(request: dict, originals: "Originals") -> dict:
    """Have a new process check one exercise, and end everything that it started."""
    token = secrets.token_hex(16)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _work(request, originals, token, writing)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        lines, ended = _read(reading, child, token, time.monotonic() + request["seconds"])
    finally:
        os.close(reading)
        _end_all()
    notes, verdict = (*lines, None, None)[:2]
    found = verdict or {"status": ERROR, "said": ended}
    if ended == TIMED_OUT and verdict is None:
        found = {"status": TIMED_OUT, "said": f"it was ended after {request['seconds']:g} seconds"}
    return {"property": "", "held": 0, "of": 0} | found | {"notes": (notes or {}).get("notes", [])}


def _read(source: int, child: int, token: str, deadline: float) -> tuple[list[dict], str]:
    """The lines that the child wrote, each after the token, and why there are no more."""
    text, status, counted = b"", 0, time.monotonic()
    while True:
        ready = select.select([source], [], [], POLL_SECONDS)[0]
        more = os.read(source, 1 << 16) if ready else b""
        text += more
        whole = text.split(b"\n")[:-1]
        if any(not line.startswith(token.encode()) for line in whole) or len(text) > MOST_BYTES:
            return [], "it wrote into the checker's pipe"
        lines = [json.loads(line[len(token) :]) for line in whole]
        if len(lines) == 2:
            return lines, ""
        if time.monotonic() > deadline:
            return lines, TIMED_OUT
        if time.monotonic() > counted + COUNT_SECONDS:
            counted = time.monotonic()
            if (found := len(psutil.Process().children(recursive=True))) > MOST_PROCESSES:
                return lines, f"it started {found} processes; the limit is {MOST_PROCESSES}"
        if not more:
            ended, status = os.waitpid(child, os.WNOHANG) if child else (1, status)
            if ended and not child:  # what it wrote before it ended has been read
                return lines, _ending(status)
            child = 0 if ended else child


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"its process ended with exit status {code} before its check did"
    return f"its process was ended by signal {signal.Signals(-code).name} before its check did"


def _end_all() -> None:
    """Kill all processes below this one until there are none left."""
    while children := psutil.Process().children(recursive=True):
        for each in children:
            try:
                os.kill(each.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            continue
        time.sleep(POLL_SECONDS / 4)


# ---- the process that runs a submission


def _work(request: dict, originals: "Originals", token: str, writing: int) -> None:
    """Check one exercise and write two lines: {"notes": [...]} before any of its code runs, and the verdict."""
    getpid, write, leave, dumps = os.getpid, os.write, os._exit, json.dumps  # a submission may replace them
    me, exercise = getpid(), checks.find(request["exercise"])

    def say(content: dict) -> None:
        if getpid() == me:  # not a process that the submission forked
            line = f"{token}{dumps(content)}\n".encode()
            while line:
                line = line[write(writing, line) :]

    _confine(request, writing)
    every, broken = submission.statements(request["cells"], NAME)
    wanted = submission.needed(submission.without_stubs(every, exercise.name), exercise.name)
    say({"notes": submission.revealing(wanted, exercise.name)})
    say(_verdict(exercise, wanted, broken, originals))
    leave(0)


def _confine(request: dict, keep: int) -> None:
    os.setsid()
    _control(SET_DEATH_SIGNAL, signal.SIGKILL)
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["folder"])
    for name in ("HOME", "TMPDIR", "TRITON_CACHE_DIR"):
        os.environ[name] = request["folder"]
    memory = int(request["memory_gb"] * (1 << 30))
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    if sys.platform == "linux":
        # Private memory that can be written. RLIMIT_AS also counts what libraries only reserve: torch needs far more.
        _limit(resource.RLIMIT_DATA, memory)
        if os.getuid():  # root has no such limit
            _limit(resource.RLIMIT_NPROC, _threads(os.getuid()) + THREADS)


def _threads(user: int) -> int:
    """Return how many threads a user's processes have, without those that end meanwhile."""
    every = [each.info for each in psutil.process_iter(["uids", "num_threads"])]
    return sum(each["num_threads"] or 0 for each in every if each["uids"] and each["uids"].real == user)


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most, most) if hard == resource.RLIM_INFINITY or most < hard else (hard, hard))


def _verdict(
    exercise: checks.Exercise,
    wanted: list[submission.Statement],
    broken: dict[str, SyntaxError],
    originals: "Originals",
) -> dict:
    """The status of a submission to one exercise, and what to say about it."""
    name, of, tampered = exercise.name, len(exercise.properties), list[str]()
    exercise = _guarded(exercise, originals, tampered)
    names, errors = submission.run(wanted, NAME)
    candidate = names.get(name)
    if candidate is None and name in errors:
        return {"status": ERROR, "said": _shortened(errors[name])}
    if candidate is None:
        begun = [error for cell, error in broken.items() if f"def {name}(" in cell or f"class {name}" in cell]
        if begun:
            return {
                "status": ERROR,
                "said": f"its cell is neither Python nor IPython: {begun[-1].msg}, line {begun[-1].lineno}",
            }
        return {"status": NOT_ATTEMPTED, "said": f"no cell of the notebook defines {name}"}
    if not callable(candidate):
        return {"status": ERROR, "said": f"{name} is not a function or class but of type {type(candidate).__name__}"}
    if str(module := getattr(candidate, "__module__", "")).partition(".")[0] == "minillm":
        return {"status": NOT_ATTEMPTED, "said": f"it is the engine's own, from {module}"}
    try:
        results = exercise.examine(candidate)
    except NotSolvedYet:
        results = None
    if changed := originals.changed() or tampered:
        return {"status": ERROR, "said": f"not checked: {changed[0]}"}
    if results is None:
        return {"status": NOT_ATTEMPTED, "said": ""}
    if exercise.accepts_nothing():
        return {"status": ERROR, "said": "not checked: with this notebook the checker accepts a function without code"}
    said = _said(results, of)
    if errors and said["status"] != PASSED:  # what fails next is a consequence
        said |= {"status": ERROR, "property": "", "said": _shortened(next(iter(errors.values())))}
    return said


def _said(results: list[checks.Result], of: int) -> dict:
    failed = next((each for each in results if each.problem is not None), None)
    needs = next((each for each in results if each.needs), None)
    held = sum(each.problem is None and each.needs is None for each in results)
    content: dict[str, Any] = {"status": PASSED, "said": "", "held": held, "of": of}
    if failed is not None:
        late = str(failed.problem).startswith(checks.STOPPED)
        content |= {"status": TIMED_OUT if late else FAILED, "property": failed.name}
        content["said"] = _shortened(str(failed.problem))
    elif needs is not None:
        content |= {"status": FAILED, "property": needs.name, "said": f"still to write: {_shortened(str(needs.needs))}"}
    elif len(results) != of:
        content |= {"status": ERROR, "said": f"not checked: {len(results)} of {of} properties have a result"}
    return content


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}…"


# ---- what a submission must not change


class Originals:
    """The functions and classes of minillm and of the modules in GUARDED, as they are before a submission runs."""

    def __init__(self) -> None:
        modules = [name for name in sys.modules if name in GUARDED or name.partition(".")[0] == "minillm"]
        owners: dict[str, tuple[Mapping[str, Any], bool]] = {}
        owners |= {name: (vars(sys.modules[name]), False) for name in sorted(modules)}
        for module in modules:
            classes = [each for each in vars(sys.modules[module]).values() if isinstance(each, type)]
            named = {each.__name__: each for each in classes if each.__module__ == module != "builtins"}
            owners |= {f"{module}.{name}": (vars(each), True) for name, each in named.items()}
        self._owners = [(where, owner, _callables(owner), closed) for where, (owner, closed) in owners.items()]

    def changed(self) -> list[str]:
        """A sentence for each function or class that is another one now, or has other code; also for a new method."""
        found = []
        for where, owner, before, closed in self._owners:
            for name, (value, code) in before.items():
                if (now := owner.get(name)) is not value or getattr(now, "__code__", None) is not code:
                    found.append(f"the notebook replaced {where}.{name}")
            if closed:
                found += [f"the notebook added {where}.{name}" for name in _callables(owner).keys() - before.keys()]
        return found


def _callables(owner: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
    """The callable values in a module or class, each with its code."""
    named = [(name, each) for name, each in list(owner.items()) if callable(each) and name not in REPLACED]
    return {name: (each, getattr(each, "__code__", None)) for name, each in named}


class _Guarded(checks.Exercise):
    """A copy of an exercise that a submission cannot find by its name."""

    def __init__(self, exercise: checks.Exercise, properties: list[checks.Property]):
        vars(self).update(vars(exercise))
        self.properties = properties

    def accepts_nothing(self) -> bool:
        """Return whether a function without code has the first property: then the checker itself was changed."""
        mine = copy.copy(self)
        mine.properties = mine.properties[:1]
        return all(result.problem is None for result in mine.examine(lambda *args, **kwargs: None))


def _guarded(exercise: checks.Exercise, originals: Originals, tampered: list[str]) -> _Guarded:
    """The exercise; `tampered` gets a sentence when a submission changes what checks it, or how results compare."""

    def watched(candidate: Callable) -> Callable:
        if not isinstance(candidate, FunctionType):
            return candidate

        @functools.wraps(candidate)
        def run(*args: Any, **kwargs: Any) -> Any:
            value = candidate(*args, **kwargs)
            if kind := _compares_itself(value):
                tampered.append(f"it returned a {kind}, a class of the notebook with its own comparison")
            return value

        return run

    def guarded(prop: checks.Property) -> checks.Property:
        def holds(candidate: Callable) -> bool | None:
            try:
                return prop.holds(watched(candidate))
            finally:
                tampered.extend(originals.changed()[:1])

        return checks.Property(prop.name, prop.hint, holds)

    return _Guarded(exercise, [guarded(each) for each in exercise.properties])


def _compares_itself(value: object, depth: int = 2) -> str:
    """The name of a notebook's class, with comparisons that it defines, that a value or an item of it has, or ""."""
    for attribute in OWN_COMPARISONS:
        found = getattr(type(value), attribute, None)
        code = getattr(getattr(found, "__func__", found), "__code__", None)
        if code is not None and f" of {NAME}>" in code.co_filename:
            return type(value).__name__
    if depth and isinstance(value, list | tuple | dict):
        items = list(value.values()) if isinstance(value, dict) else value
        return next((kind for each in items[:100] if (kind := _compares_itself(each, depth - 1))), "")
    return ""
