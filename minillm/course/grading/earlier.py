"""Read what a learner wrote from the saved notebooks next to the current one, and from the current one.  Lesson 99.

    mine = earlier.written(globals())
    with minillm.using(**mine.parts) as used: ...

Only a notebook's definitions are run: imports, functions, classes and CONSTANTS, and every simple assignment in an
exercise's cell. A part is taken if it passes the check of its exercise; otherwise the engine's own stays.
"""

import ast
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import torch
from torch import Tensor

from minillm.errors import ConfigError, MissingPackage
from minillm.kv_cache.layer_cache import LayerCache
from minillm.overrides import NotSolvedYet
from minillm.scheduler.policies import FirstComeFirstServed

from ..lesson_06 import calibrated
from ..shared import adapters, checks, interpret
from ..shared.stubs import solved
from . import submission
from .submission import Names

DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
_DEFINED = re.compile(r"^(?:def|class) +(\w+)", re.MULTILINE)
RAISED = "it raised "  # begins what `checks` says of an exception
LAST = "99"


def definitions(cells: Sequence[str], name: str, exercises: Collection[int] = ()) -> tuple[Names, dict[str, str]]:
    """Return what cells of code define, and the errors of definitions that failed, by the names that they define.

    name: of the lesson, for error messages. exercises: the numbers, from 0, of exercises' cells; assignments to names
    are kept there too, since a solution may need them. A cell that is not Python is left out, with an error for each
    function and class that it would have defined.
    """
    every, broken = submission.statements(cells, name)
    names, errors = submission.run([each for each in every if _defines(each.node, each.cell in exercises)], name)
    for cell, error in broken.items():
        errors |= dict.fromkeys(_DEFINED.findall(cell), f"its cell is not Python: {error.msg}")
    return names, errors


def _defines(node: ast.stmt, in_exercise: bool) -> bool:
    """Return whether a statement is kept: a definition, a CONSTANT, or an assignment to names in an exercise's cell."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    else:
        return isinstance(node, DEFINITIONS)
    constant = isinstance(targets[0], ast.Name) and targets[0].id.isupper()
    return constant or (in_exercise and all(isinstance(each, ast.Name | ast.Tuple | ast.List) for each in targets))


@dataclass(frozen=True)
class Part:
    """A part of the engine that exercises replace.

    lesson: its number. exercises: all must be right. adapt: makes `using`'s arguments from a notebook's definitions,
    or "order" and "share", which a policy is made of. needs_triton: whether the part is a Triton kernel.
    """

    what: str
    lesson: str
    exercises: tuple[str, ...]
    adapt: Callable[[Names], dict[str, Callable]]
    needs_triton: bool = False


@dataclass(frozen=True)
class Notebook:
    """The definitions of a notebook.

    file: its name. names: what it defines. errors: why a definition failed, by the name that it would have bound.
    problem: why it cannot be read, with the way out.
    """

    file: str
    names: Names = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class Written:
    """The code that a learner wrote.

    plain, kernels: for `using` while serving, without Triton kernels and only these. quantizer: for `using` while
    quantizing. whose: {what a part does: by whom}.
    """

    plain: dict[str, Callable]
    kernels: dict[str, Callable]
    quantizer: dict[str, Callable]
    whose: dict[str, str]

    @property
    def parts(self) -> dict[str, Callable]:
        """All for `using` while serving; where a kernel and another function replace the same part, the kernel does."""
        return self.plain | self.kernels


def written(current: Names | None = None, folder: Path | None = None) -> Written:
    """Everything that the notebooks in `folder` (default: where this runs) contribute to one running engine.

    current: what lesson 99's notebook has defined so far. It counts, not what was saved, if an exercise is in it.
    """
    folder = folder or Path.cwd()
    triton = has_triton()
    plain: dict[str, Callable] = {}
    kernels: dict[str, Callable] = {}
    whose, read = {}, dict[str, Notebook]()
    if current is not None and any(name in current for part in PARTS if part.lesson == LAST for name in part.exercises):
        read[LAST] = Notebook("this notebook", current)
    for part in PARTS:
        if part.lesson not in read and (triton or not part.needs_triton):
            read[part.lesson] = _read(folder, part.lesson)
        runs = triton or not part.needs_triton
        problem = _problem(part, read[part.lesson]) if runs else "triton does not run here"
        if problem is None:
            (kernels if part.needs_triton else plain).update(part.adapt(read[part.lesson].names))
        whose[f"{part.what} (lesson {part.lesson})"] = "yours" if problem is None else f"the engine's: {problem}"
    quantizer = {name: plain.pop(name) for name in ("gptq",) if name in plain}
    plain |= _policy(plain.pop("order", None), plain.pop("share", None))
    return Written(plain, kernels, quantizer, whose)


def has_triton() -> bool:
    """Return whether Triton's kernels run here, interpreted on a CPU. Ask before anything else imports Triton."""
    try:
        interpret.triton_here()
    except (MissingPackage, ConfigError):
        return False
    return True


def _read(folder: Path, lesson: str) -> Notebook:
    """Return what a lesson's notebook defines."""
    path = min(folder.glob(f"{lesson}_*.ipynb"), key=lambda path: len(path.name), default=None)  # copies are longer
    if path is None:
        name = f"{lesson}_*.ipynb"
        return Notebook(name, problem=f"no {name} next to this notebook; copy yours here, and run this cell again")
    try:
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    except Exception:  # nbformat raises many kinds
        said = f"{path.name} is not a notebook that can be read; save it again from Jupyter, or copy a backup here"
        return Notebook(path.name, problem=said)
    exercises = {place for place, cell in enumerate(cells) if "exercise" in cell.metadata.get("tags", [])}
    return Notebook(path.name, *definitions([cell.source for cell in cells], path.stem, exercises))


def _problem(part: Part, notebook: Notebook) -> str | None:
    """Return why a part cannot be taken, in a few words; None if it can."""
    if notebook.problem is not None:
        return notebook.problem
    for exercise in part.exercises:
        candidate = notebook.names.get(exercise)
        if candidate is None:
            error = notebook.errors.get(exercise)
            said = f"{exercise} is not defined in {notebook.file}"
            return f"{said}: {_advised(error)}" if error else f"{said}; write it there, save, and run this cell again"
        if not all(solved(each) for each in (candidate, notebook.names.get(f"{exercise}_kernel", abs))):
            return f"{exercise} is not solved yet"
        try:
            failed = [each for each in checks.find(exercise).examine(candidate) if each.problem]
        except NotSolvedYet as stub:  # of another function, which this one calls
            return f"{exercise} needs {stub}, which is not solved yet"
        if failed:
            said = str(failed[0].problem).splitlines()[0]
            raised = f": {_advised(said)}" if said.startswith(RAISED) else ""
            return f"{exercise} fails its check ({failed[0].name}){raised}"
    return None


def _advised(error: str) -> str:
    """An error in words, with the way out if a name is missing: only some of a notebook's names are read."""
    if "NameError" not in error:
        return error
    return f"{error}; move what it needs into the cell of the exercise"


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


def _decode(names: Names) -> dict[str, Callable]:
    def decode_attention(
        q: Tensor, cache: LayerCache, block_table: Tensor, lengths: Tensor, *, scale: float, **options: Any
    ) -> Tensor:
        k, v = (part[block_table].flatten(1, 2) for part in (cache.k, cache.v))
        return names["batched_attention"](q.squeeze(1), k, v, lengths.clamp(min=1), scale).unsqueeze(1)

    return {"decode_attention": decode_attention}


def _policy(order: Any, share: Any) -> dict[str, Callable]:
    """A policy with the learner's order, sharing or both, if there is one of them; the rest is the engine's."""
    if order is None and share is None:
        return {}

    def shared(self: Any, pending: Any, budget: int) -> Any:
        return share(pending, budget)

    return {"policy": type("Policy", (order or FirstComeFirstServed,), {} if share is None else {"share": shared})}


PARTS = (
    Part("tokenizer's merges", "01", ("bpe_merge",), lambda names: {"bpe_merge": names["bpe_merge"]}),
    Part("norm", "00", ("rms_norm",), lambda names: {"rms_norm": names["rms_norm"]}),
    Part("attention of prompts", "02", ("cached_attention",), _prefill),
    Part("attention of decode steps", LAST, ("batched_attention",), _decode),
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
    Part("order of the queue", "10", ("PatientShortest",), lambda names: {"order": names["PatientShortest"]}),
    Part("sharing of a step", "10", ("share_budget",), lambda names: {"share": names["share_budget"]}),
)
