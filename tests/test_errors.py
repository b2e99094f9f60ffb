"""All errors have one base class, and every user mistake has an error class."""

import ast
import builtins
import functools
import re
from pathlib import Path

import pytest

from minillm import errors
from minillm.errors import MinillmError

ROOT = Path(__file__).resolve().parents[1]
# Bugs and violated internal contracts raise built-in classes and keep their traceback.
BUILT_IN = {
    "minillm/from_vllm/__init__.py": {"ImportError"},  # `from minillm.from_vllm import` shows its message
    "minillm/from_vllm/attributes.py": {"AttributeError"},  # `getattr` requires it
    "minillm/bench/ablation.py": {"ValueError"},  # torch_attention, an operation like those in `minillm.ops`
    "minillm/bench/offline.py": {"RuntimeError"},  # fewer tokens than requested: a bug
    "minillm/bench/peers.py": {"RuntimeError"},
    "minillm/course/lesson_11/graph_sizes.py": {"ValueError"},  # the check of lesson 11's exercise shows it
    "minillm/course/lesson_14/ranks.py": {"AssertionError"},  # an exchange without a partner; its check reports it
    "minillm/course/shared/adapters.py": {"ValueError"},  # lesson 02's exercise requires it of `append`
    # inside a learner's kernel that never ends; its check reports it
    "minillm/course/shared/interpret.py": {"RuntimeError"},
    # what a socket raises: the caller handles both alike
    "minillm/deploy/handshake.py": {"TimeoutError", "ConnectionResetError"},
    "minillm/evaluate/perplexity.py": {"ValueError"},  # log-probabilities that its own request asked for
    "minillm/lazy_imports.py": {"AttributeError"},  # `getattr` requires it
    "minillm/model/parallel.py": {"AssertionError"},  # messages between stages, where there is one
    "minillm/model/saver.py": {"OSError"},  # the disk is full
    "minillm/model/single_row.py": {"ValueError"},  # callers ask `SingleRow.fits` first
    "minillm/pretrained/gguf_file.py": {"OSError"},  # a library in Rust reports the disk's errors as text
    "minillm/runner/mixed_graphs.py": {"MemoryError"},  # of a rank, whose engine reports it as RankFailed
    "minillm/engine/engine.py": {"TypeError"},  # `Engine.model` of an engine whose executor is elsewhere
    "minillm/advice/plan.py": {"ValueError"},  # `Plan.read` turns it into a ConfigError
    "minillm/tuning/trials.py": {"RuntimeError"},  # a kernel with wrong results
}


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    names = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "minillm").rglob("*.py"))}
    return [
        (name, ast.parse(path.read_text(encoding="utf-8")))
        for name, path in names.items()
        if not name.startswith("minillm/data/")
    ]


def is_exception(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, BaseException)


def base_names(node: ast.ClassDef) -> list[str]:
    return [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases]


def test_every_error_class_is_a_minillm_error():
    classes = {
        node.name: {base for base in base_names(node) if base != node.name}
        for _, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def raisable(name: str) -> bool:
        return is_exception(name) or any(map(raisable, classes.get(name, ())))

    def ours(name: str) -> bool:
        return name == "MinillmError" or any(map(ours, classes.get(name, ())))

    # TookTooLong interrupts a learner's code, and no `except Exception` may catch it. The others are failed assertions.
    found = [name for name in classes if raisable(name) and name not in ("TookTooLong", "Explained", "Stuck")]
    assert {"ConfigError", "OutOfBlocks", "TokenizerError", "PortTaken"} <= set(found)
    assert [name for name in found if not ours(name)] == []


def test_built_in_exceptions_are_raised_only_for_what_no_user_can_fix():
    raised = {}
    for name, tree in modules():
        if name.startswith("minillm/server/"):
            continue
        calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
        kinds = {call.func.id for call in calls if isinstance(call.func, ast.Name) and is_exception(call.func.id)}
        if re.fullmatch(r"minillm/course/lesson_\d+/checks\w*\.py", name):
            kinds -= {"AssertionError"}  # which a checker reports
        if kinds:
            raised[name] = kinds
    assert raised == BUILT_IN


@pytest.mark.parametrize(
    ("error", "built_in"),
    [
        (errors.ConfigError, ValueError),
        (errors.InvalidRequest, ValueError),
        (errors.EngineClosed, RuntimeError),
        (errors.RankFailed, RuntimeError),
        (errors.MissingPackage, ImportError),
        (errors.Unreachable, ConnectionError),
    ],
)
def test_an_error_is_also_its_built_in_exception(error, built_in):
    assert issubclass(error, MinillmError) and issubclass(error, built_in)
