"""The packages and modules of minillm form layers: each imports only those below it."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import minillm

pytestmark = pytest.mark.key

ROOT = Path(__file__).resolve().parents[2]
# From top to bottom: each may import only those after it.
LAYERS = (
    *(
        "__main__",
        "cli",
        "course",
        "report",
        "tuning",
        "deploy",
        "server",
        "from_vllm",
        "bench",
        "evaluate",
        "calibration",
        "engine",
        "advice",
        "parallel",
        "runner",
        "adapters",
        "scheduler",
        "speculation",
        "model",
        "ops",
        "pretrained",
    ),
    *(
        "quantization",
        "kv_cache",
        "trace",
        "tokenizer",
        "overrides",
        "request",
        "request_values",
        "grammar",
        "prompts",
        "config",
        "lazy_imports",
    ),
    *("values", "errors", "version", "cores", "folders", "garbage", "kernels"),
)


def layer(module: str) -> str:
    """ "minillm.engine.llm" -> "engine"; "" for "minillm" itself, which only re-exports public names."""
    return ".".join(module.split(".")[1:2])


@cache
def modules() -> tuple[tuple[str, ast.Module], ...]:
    found = []
    for path in sorted((ROOT / "minillm").rglob("*.py")):
        if "data" not in path.relative_to(ROOT).parts:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.append((name, ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(found)


def imported(name: str, tree: ast.Module) -> Iterator[str]:
    """Every module of minillm that a module imports, at the top or in a function, including for type checking."""
    package = name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "minillm")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            if whole == "minillm":
                yield from (f"minillm.{alias.name}" for alias in node.names)
            elif whole.startswith("minillm."):
                yield whole


def files_imported(name: str, tree: ast.Module, files: Set[str]) -> Iterator[str]:
    """Every file of minillm that a file imports, but for type checking alone; a package is its `__init__`."""
    checking = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    left_out = {id(inner) for node in checking for inner in ast.walk(node)}
    for node in (node for node in ast.walk(tree) if id(node) not in left_out):
        if isinstance(node, ast.ImportFrom):
            base = name.split(".")[: -node.level] if node.level else []
            whole = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            targets = [f"{whole}.{alias.name}" for alias in node.names]
            targets = [target if {target, f"{target}.__init__"} & files else whole for target in targets]
        else:
            targets = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for target in targets:
            found = f"{target}.__init__" if f"{target}.__init__" in files else target
            if found in files - {name, "minillm.__init__"}:
                yield found


def public() -> dict[str, str]:
    """The public names of `minillm` and the modules that define them."""
    import minillm

    return {name: getattr(minillm, name).__module__ for name in minillm.__all__}


def test_modules_import_only_lower_layers():
    upwards, homes = [], public()
    for name, tree in modules():
        if layer(name) in ("", "__init__"):
            continue
        for target in imported(name, tree):
            last = target.split(".")[-1]
            target = homes.get(last, target) if layer(target) == last else target
            if LAYERS.index(layer(target)) < LAYERS.index(layer(name)):
                upwards.append(f"{name} imports {target}")
    assert not upwards, upwards


def test_no_files_import_each_other_in_a_circle():
    """Neither at the top of a file nor in a function."""
    trees = dict(modules())
    graph = {name: set(files_imported(name, tree, trees.keys())) for name, tree in trees.items()}
    assert sum(map(len, graph.values())) > 1000
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def test_a_lessons_folder_imports_no_later_lesson_and_what_lessons_share_imports_none():
    trees = dict(modules())
    lesson = re.compile(r"minillm\.course\.(lesson_\d\d)\.")
    wrong = []
    for name, tree in trees.items():
        if name.startswith(("minillm.course.lesson_", "minillm.course.shared.")):
            here = found[1] if (found := lesson.match(name)) else ""
            there = {found[1] for each in files_imported(name, tree, trees.keys()) if (found := lesson.match(each))}
            wrong += [f"{name} imports {each}" for each in there if each > here]
    assert not wrong, wrong


def test_no_two_rooms_have_classes_of_one_name():
    """Except where a script's imports are the point: from_vllm has subclasses of the engine's."""
    rooms: dict[str, set[str]] = {}
    files = [(layer(name), tree) for name, tree in modules()]
    for path in sorted((ROOT / "kernels").glob("*.py")):  # each of them is a room here
        files.append((f"kernels/{path.stem}", ast.parse(path.read_text(encoding="utf-8"))))
    for room, tree in files:
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and room != "from_vllm":
                rooms.setdefault(node.name, set()).add(room)
    assert len(rooms) > 300
    assert {name: where for name, where in rooms.items() if len(where) > 1} == {}


def test_only_the_server_and_the_command_line_know_vllms_words():
    rooms = {layer(name) for name, tree in modules() if "from_vllm" in map(layer, imported(name, tree))}
    assert rooms == {"cli", "from_vllm", "server"}


def test_the_folders_of_the_servers_processes_do_not_import_each_other():
    processes = {f"minillm.server.{name}" for name in ("supervisor", "worker", "engine_side")}
    found = [
        f"{name} imports {target}"
        for name, tree in modules()
        for target in imported(name, tree)
        if (own := ".".join(name.split(".")[:3])) in processes and ".".join(target.split(".")[:3]) in processes - {own}
    ]
    assert not found, found


def test_every_folder_and_file_of_the_package_is_listed():
    found = {layer(name) for name, _ in modules()} - {"__init__"}
    assert found | {"kernels"} == set(LAYERS)


def test_kernels_import_nothing_from_minillm():
    for path in (ROOT / "kernels").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        above = [each for each in imported(f"minillm.kernels.{path.stem}", tree) if layer(each) != "kernels"]
        assert not above, f"{path.name} imports {above}"


@pytest.mark.parametrize(
    "module",
    [
        "minillm",
        "minillm.cli",
        "minillm.scheduler",
        "minillm.server.worker.worker",
        "minillm.server.worker.app",
        "minillm.advice.sizing",
    ],
)
def test_the_module_does_not_import_torch(module):
    code = f"import sys, {module}; assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_public_name_of_a_package_can_be_imported():
    rooms = [path.parent.name for path in (ROOT / "minillm").glob("*/__init__.py")]
    packages = [minillm, *(import_module(f"minillm.{room}") for room in rooms)]
    names = [(package, name) for package in packages for name in getattr(package, "__all__", ())]
    assert len(names) > 40
    for package, name in names:
        assert getattr(package, name) is not None
