"""Most scripts measure on a GPU, so no test runs them: every name that they take from the project still exists."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "tools").glob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def file_of(module: str) -> Path:
    """The file of a module of the project; of a package, its `__init__`."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def names(path: Path) -> set[str]:
    """What a module defines or imports, in functions too, and the texts in it: some packages export names lazily."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def used(path: Path) -> list[tuple[str, str]]:
    """(module, name) of all that a script imports from the project, and of the attributes of modules among it."""
    found, modules = [], {}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] in ("minillm", "tests"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if file_of(whole).exists():
                    modules[alias.asname or alias.name] = whole
                else:
                    found.append((node.module, alias.name))
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found.append((modules[node.value.id], node.attr))
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_names_that_a_script_uses_exist(script):
    assert not [
        f"{module}.{name}"
        for module, name in used(script)
        if not (name in names(file_of(module)) or file_of(f"{module}.{name}").exists() or name.startswith("__"))
    ]


def test_most_scripts_use_the_project():
    assert sum(bool(used(script)) for script in SCRIPTS) > 30
    assert ("minillm.kernels.paged_attention", "decode_config") in used(ROOT / "tools" / "kernel_speed.py")
