"""What a learner wrote in earlier lessons, read from the notebooks next to the current one.  Lesson 99.

    mine = earlier.written()
    with minillm.using(**mine.parts) as used: ...

Only a notebook's definitions are run: imports, functions, classes and CONSTANTS. A part is taken if it passes the check
of its exercise; otherwise the engine's own stays.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import torch
from torch import Tensor

from minillm.errors import ConfigError, MissingPackage

from ..lesson_06 import calibrated
from ..shared import adapters, checks, interpret
from ..shared.stubs import solved
from . import submission
from .submission import Names

DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def definitions(cells: Sequence[str], name: str) -> Names:
    """What cells of code define. name: of the lesson, for error messages.

    A cell that is not Python is left out, and so is a definition that fails, such as one that needs a variable.
    """
    every, _ = submission.statements(cells, name)
    return submission.run([each for each in every if _defines(each.node)], name)[0]


def _defines(node: ast.stmt) -> bool:
    constant = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    return isinstance(node, DEFINITIONS) or (constant and node.targets[0].id.isupper())  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Part:
    """A part of the engine that earlier exercises replace.

    lesson: its number. exercises: all must be right. adapt: makes `using`'s arguments from a notebook's definitions.
    """

    what: str
    lesson: str
    exercises: tuple[str, ...]
    adapt: Callable[[Names], dict[str, Callable]]
    needs_triton: bool = False


@dataclass(frozen=True)
class Written:
    """parts: for `using` while serving. quantizer: for `using` while quantizing. whose: {what a part does: by whom}."""

    parts: dict[str, Callable]
    quantizer: dict[str, Callable]
    whose: dict[str, str]


def written(folder: Path | None = None) -> Written:
    """Everything that the notebooks in `folder` (default: where this runs) contribute to one running engine."""
    folder = folder or Path.cwd()
    triton = has_triton()
    found: dict[str, Callable] = {}
    whose, read = {}, dict[str, Names | None]()
    for part in PARTS:
        if part.lesson not in read and (triton or not part.needs_triton):
            read[part.lesson] = _read(folder, part.lesson)
        names = read.get(part.lesson)
        problem = "triton does not run here" if part.needs_triton and not triton else _problem(part, names)
        if problem is None and names is not None:
            found |= part.adapt(names)
        whose[f"{part.what} (lesson {part.lesson})"] = "yours" if problem is None else f"the engine's: {problem}"
    quantizer = {name: found.pop(name) for name in ("gptq",) if name in found}
    return Written(found, quantizer, whose)


def has_triton() -> bool:
    """Whether Triton's kernels run here, interpreted on a CPU. Ask before anything else imports Triton."""
    try:
        interpret.triton_here()
    except (MissingPackage, ConfigError):
        return False
    return True


def _read(folder: Path, lesson: str) -> Names | None:
    """The definitions of a lesson's notebook; None if it is not there, or is no notebook."""
    path = min(folder.glob(f"{lesson}_*.ipynb"), key=lambda path: len(path.name), default=None)  # copies are longer
    if path is None:
        return None
    try:
        cells = nbformat.read(path, as_version=4).cells
    except Exception:  # nbformat raises many kinds
        return None
    return definitions([cell.source for cell in cells if cell.cell_type == "code"], path.stem)


def _problem(part: Part, names: Names | None) -> str | None:
    """Why a part cannot be taken, in a few words; None if it can."""
    if names is None:
        return "no readable notebook of that lesson here"
    for exercise in part.exercises:
        candidate = names.get(exercise)
        if candidate is None:
            return f"{exercise} is not defined there"
        if not all(solved(each) for each in (candidate, names.get(f"{exercise}_kernel", abs))):
            return f"{exercise} is not solved yet"
        if failed := [each.name for each in checks.find(exercise).examine(candidate) if each.problem]:
            return f"{exercise} fails its check ({failed[0]})"
    return None


def _gated_activation(names: Names) -> dict[str, Callable]:
    def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        names["geglu"](gate_up, out)
        return out

    return {"gated_activation": gated_activation}


def _add_rms_norm(names: Names) -> dict[str, Callable]:
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, total = torch.empty_like(x), torch.empty_like(x)
        names["add_row_norm"](x, residual, weight, eps, out, total)
        return out, total

    return {"add_rms_norm": add_rms_norm}


def _prefill(names: Names) -> dict[str, Callable]:
    return {"prefill_attention": adapters.gathered(names["cached_attention"])["prefill_attention"]}


def _policy(names: Names) -> dict[str, Callable]:
    def share(self: Any, pending: Any, budget: int) -> Any:
        return names["share_budget"](pending, budget)

    return {"policy": type("Policy", (names["PatientShortest"],), {"share": share})}


PARTS = (
    Part("tokenizer's merges", "01", ("bpe_merge",), lambda names: {"bpe_merge": names["bpe_merge"]}),
    Part("norm", "00", ("rms_norm",), lambda names: {"rms_norm": names["rms_norm"]}),
    Part("attention of prompts", "02", ("cached_attention",), _prefill),
    Part("kernel of the activation", "03", ("geglu",), _gated_activation, needs_triton=True),
    Part("kernel of add and norm", "03", ("add_row_norm",), _add_rms_norm, needs_triton=True),
    Part(
        "kernel of decode attention",
        "04",
        ("paged_decode",),
        lambda names: {"decode_attention": names["paged_decode"]},
        needs_triton=True,
    ),
    Part("quantizer", "06", ("gptq",), lambda names: {"gptq": calibrated.gptq_part(names["gptq"])}),
    Part("block pool", "09", ("MyPrefixPool",), lambda names: {"block_pool": names["MyPrefixPool"]}),
    Part("policy", "10", ("PatientShortest", "share_budget"), _policy),
)
