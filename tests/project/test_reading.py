"""docs/reading.md and docs/left_out.md: every name in them exists, and the core that is listed stays small."""

import ast
import re
from pathlib import Path

import pytest

from tests.project.lines import code_lines
from tests.project.makefile import ROOT

PAGE = ROOT / "docs" / "reading.md"
TEXT = PAGE.read_text(encoding="utf-8")
LEFT_OUT = (ROOT / "docs" / "left_out.md").read_text(encoding="utf-8")
MOST_LINES = 2_800  # of code in the core
LINK = re.compile(r"\]\(\.\./([^)#]+)\)")
NAME = re.compile(r"`([A-Za-z_][\w.]*)`")


def core() -> list[tuple[str, list[str], str]]:
    """Of each file of the core: its path, the names to read first and to skip, and its lesson."""
    found = []
    for table in TEXT.split("<!-- core -->")[1:]:
        for line in table.strip().splitlines()[2:]:
            if not line.startswith("|"):
                break
            file, question, first, skip, lesson = (cell.strip() for cell in line.strip("|").split("|"))
            assert question.endswith("?"), line
            path = LINK.search(file)
            assert path and NAME.findall(first), line
            found.append((path[1], NAME.findall(first + skip), lesson))
    return found


def members(tree: ast.Module) -> set[str]:
    """The functions, classes and constants of a module, its classes' methods and fields as Class.name."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {ast.unparse(target) for target in node.targets}
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    found.add(f"{node.name}.{inner.name}")
                elif isinstance(inner, ast.AnnAssign):
                    found.add(f"{node.name}.{ast.unparse(inner.target)}")
    return found


def parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def test_there_are_three_sittings():
    assert TEXT.count("<!-- core -->") == len(re.findall("^## Sitting", TEXT, re.MULTILINE)) == 3
    assert len(core()) == len({path for path, *_ in core()}) >= 20


@pytest.mark.parametrize(("path", "names", "lesson"), core(), ids=[path for path, *_ in core()])
def test_what_to_read_and_to_skip_is_in_the_file(path, names, lesson):
    assert set(names) <= members(parsed(path)) | {"SamplingParams"}
    module = ast.get_docstring(parsed(path)) or ""
    lessons = [
        range(int(first), int(last or first) + 1) for first, last in re.findall(r"(\d\d)(?: to (\d\d))?", module)
    ]
    assert any(int(lesson) in each for each in lessons), f"{path} is explained in {module.splitlines()[0]}"


def imported(tree: ast.Module, path: str) -> set[str]:
    """The files that a module may import when it runs: with `from .a import b`, both a.py and a/b.py."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            package = Path(path).parts[: -node.level] if node.level else ()
            module = Path(*package, *(node.module or "").split("."))
            found |= {f"{each.as_posix()}.py" for each in (module, *(module / name.name for name in node.names))}
    return found


def test_a_file_of_the_core_imports_nothing_from_those_below_it():
    paths = [path for path, *_ in core()]
    below = {path: imported(parsed(path), path) & set(paths[place:]) for place, path in enumerate(paths)}
    assert not {path: files for path, files in below.items() if files}
    assert imported(parsed("minillm/runner/runner.py"), "minillm/runner/runner.py") & set(paths)


def test_every_name_that_the_page_mentions_exists():
    files = {path for path, *_ in core()} | {path for path in LINK.findall(TEXT) if path.endswith(".py")}
    everywhere = set().union(*(members(parsed(path)) for path in files))
    parameters = {argument.arg for path in files for node in ast.walk(parsed(path)) for argument in arguments(node)}
    named = {name for name in NAME.findall(TEXT) if name != "minillm"}
    assert len(named) > 40
    assert named <= everywhere | parameters


def arguments(node: ast.AST) -> list[ast.arg]:
    return node.args.args + node.args.kwonlyargs if isinstance(node, ast.FunctionDef) else []


def test_a_place_is_ray_serves_in_all_names():
    """The table of words keeps `place` for minillm/deploy; in prose it may mean what it means in English."""
    apart = [ROOT / "minillm" / each for each in ("course", "deploy", "kernels")]  # the last is a link to kernels/
    files = [file for folder in ("minillm", "kernels") for file in sorted((ROOT / folder).rglob("*.py"))]
    named = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        if not any(file.is_relative_to(folder) for folder in apart)
        for name in sorted(names(ast.parse(file.read_text(encoding="utf-8"))))
        if {"place", "places"} & set(name.split("_"))
    ]
    assert "| place | Only in [deploy]" in TEXT
    assert not named


def names(tree: ast.Module) -> set[str]:
    """The parameters, attributes and variables of a module, and keywords of calls."""
    found = {node.arg for node in ast.walk(tree) if isinstance(node, (ast.arg, ast.keyword)) and node.arg}
    found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("section", LEFT_OUT.split("\n## ")[1:], ids=lambda section: section.splitlines()[0])
def test_what_the_course_leaves_out(section):
    """Each subject has the engine's names for it, a lesson where it would go, and a source with its year."""
    files = [path for path in LINK.findall(section) if path.endswith(".py")]
    assert set(NAME.findall(section)) <= set().union(*(members(parsed(path)) for path in files))
    engine, lesson, read = re.split(r"\n\* \*\*(?:Lesson|Read):\*\* ", section[section.index("* **The engine** ") :])
    assert engine and list((ROOT / "notebooks").glob(f"{lesson[:2]}_*.ipynb"))
    assert re.match(r"[A-Z].* \d{4}, \*[^*]+\*", read)


def test_the_core_stays_small():
    """Move what a reader can do without to a file of its own, before a feature is added to these."""
    lines = {path: code_lines(ROOT / path) for path, *_ in core()}
    assert sum(lines.values()) <= MOST_LINES, lines
    (stated,) = re.findall(r"core is (\d+) files and about ([\d,]+) lines", TEXT)
    assert int(stated[0]) == len(lines)
    assert abs(int(stated[1].replace(",", "")) - sum(lines.values())) < 100, sum(lines.values())


ROOMS = sorted((ROOT / "minillm").glob("*/**/__init__.py"))


@pytest.mark.parametrize("file", ROOMS, ids=lambda file: str(file.parent.relative_to(ROOT / "minillm")))
def test_each_room_says_what_belongs_there_and_what_does_not(file):
    text = " ".join((ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split())
    assert re.search(r"\b(belongs? (in )?here\b.* do(es)? not|does not belong here)\b", text), text


def test_the_readme_leads_to_it():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/left_out.md" in readme
    assert "docs/reading.md" in "\n".join(readme.splitlines()[:45])
    assert re.findall(r"the core is (\d+) files", readme) == [str(len(core()))]
