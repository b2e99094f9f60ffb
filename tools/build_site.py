"""Build the course's site from the repository: lessons with folded solutions, docs, API reference, records as plots.

    make site                                         writes build/site/index.html
    .venv/bin/python tools/build_site.py              the same without make
    .venv/bin/python tools/build_site.py --check      only check the links of the site that is there

Jupyter Book needs other versions of some packages, so it gets an environment of its own, build/site-venv, made by the
same Python. Pages load nothing from the network, so they work from a folder. Notebooks are not executed: outputs are
the committed ones. The build fails if a link is broken.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import nbformat
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import minillm  # noqa: E402
from tools.site import lessons, links, plots  # noqa: E402

BUILD = ROOT / "build"
SOURCE, SITE, VENV = BUILD / "site-source", BUILD / "site", BUILD / "site-venv"
PROGRAMS = VENV / ("Scripts" if os.name == "nt" else "bin")
REQUIREMENTS = ROOT / "tools" / "site" / "requirements.txt"
HOME = "index.md"  # what README.md is called there
ASSETS = ROOT / "tools" / "site" / "assets"
API = "API reference"
TEACHING = ("instructors", "grading", "talking_points")
MISTAKES = "docs/mistakes.md"  # a page of the site alone
MODULES = ("config", "errors")  # documented like the packages, which say in `__all__` what is public
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)]*)?\)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check the links of the site that is there")
    options = parser.parse_args()
    if not options.check:
        for command in set_up():
            subprocess.run(command, check=True)
        (VENV / ".installed").touch()
        write_sources()
        run_book()
    found = links.problems(SITE)
    if found:
        sys.exit("\n".join(found))
    pages = len(list(SITE.rglob("*.html")))
    print(f"{pages} pages, all links work, nothing is loaded from elsewhere: {SITE / 'index.html'}")


def set_up() -> list[list[str]]:
    """The commands that install Jupyter Book; none if it is there and no older than its requirements."""
    stamp = VENV / ".installed"
    if stamp.exists() and stamp.stat().st_mtime >= REQUIREMENTS.stat().st_mtime:
        return []
    # Every package is listed, so pip has nothing to resolve, which takes it minutes.
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(REQUIREMENTS)]
    return [[sys.executable, "-m", "venv", str(VENV)], [str(PROGRAMS / "python"), *install]]


def write_sources() -> None:
    """Write what Jupyter Book reads: pages at the paths that they have in the repository, and its two settings."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    parts = contents()
    for path in [each for pages in parts.values() for each in pages]:
        target = SOURCE / (HOME if path == "README.md" else path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".ipynb"):
            write_lesson(target)
        elif path.startswith("api/"):
            target.write_text(api_page(Path(path).stem), encoding="utf-8")
        elif path == MISTAKES:
            subprocess.run([sys.executable, str(ROOT / "tools" / "list_mistakes.py")], check=True)
            target.write_text((BUILD / "mistakes.md").read_text(encoding="utf-8"), encoding="utf-8")
        elif path.startswith("records/"):
            target.write_text(plots.page(Path(path).stem), encoding="utf-8")
            copy_linked(target, path)
        else:
            target.write_text((ROOT / path).read_text(encoding="utf-8"), encoding="utf-8")
            copy_linked(target, path)
    (SOURCE / "_static").mkdir()
    shutil.copy(ASSETS / "site.css", SOURCE / "_static")
    (SOURCE / "_toc.yml").write_text(yaml.safe_dump(toc(parts), sort_keys=False), encoding="utf-8")
    shutil.copy(ROOT / "tools" / "site" / "book.yml", SOURCE / "_config.yml")


def write_lesson(target: Path) -> None:
    """Write one lesson's notebook, which links to its copy without outputs."""
    folders = (ROOT / "notebooks", ROOT / "notebooks" / "solutions")
    lesson = lessons.merged(*(nbformat.read(folder / target.name, 4) for folder in folders))
    lesson.cells[0].source += f"\n\n{{download}}`Download this notebook without outputs <clean/{target.name}>`"
    nbformat.write(lesson, target)
    clean = target.parent / "clean" / target.name
    clean.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / "notebooks" / "clean" / target.name, clean)


def contents() -> dict[str, list[str]]:
    """The site's pages by part. A page has its path in the repository; those of api/ and records/ and
    MISTAKES are written here.
    """
    docs = {path.stem: f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))}
    teaching = [*(docs.pop(name) for name in TEACHING), MISTAKES]
    measurements = [docs.pop("measurements"), *(f"records/{name}.md" for name in plots.DEVICES)]
    return {
        "": ["README.md"],
        "Lessons": [f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))],
        "Measurements": measurements,
        "Guides": [*docs.values(), "data/README.md"],
        "For instructors": teaching,
        API: [f"api/{module}.md" for module in modules()],
        "Project": ["CONTRIBUTING.md", "CHANGELOG.md"],
    }


def toc(parts: dict[str, list[str]]) -> dict:
    """Jupyter Book's table of contents. Modules are below the first page of their part, and shown when it is open."""
    found = []
    for caption, pages in parts.items():
        files = [{"file": page.rsplit(".", 1)[0]} for page in pages]
        if caption == API:
            files = [{**files[0], "sections": files[1:]}]
        found.append({"caption": caption, "chapters": files})
    return {"format": "jb-book", "root": "index", "parts": [part for part in found if part["caption"]]}


def modules() -> Iterator[str]:
    """The names of the documented modules: minillm, its packages with an `__all__`, some modules, the kernels."""
    yield "minillm"
    for path in sorted((ROOT / "minillm").glob("*/__init__.py")):
        names = [
            each.id for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(each, ast.Name)
        ]
        if "__all__" in names:
            yield f"minillm.{path.parent.name}"
    yield from (f"minillm.{name}" for name in MODULES)
    yield from (f"minillm.kernels.{path.stem}" for path in sorted((ROOT / "kernels").glob("*.py")))


def api_page(module: str) -> str:
    """A page in Markdown on which Sphinx writes the docstrings of a module's public names."""
    elsewhere = "" if module == "minillm" else f"   :exclude-members: {', '.join(minillm.__all__)}\n"  # on its page
    return f"# {module}\n\n```{{eval-rst}}\n.. automodule:: {module}\n   :members:\n{elsewhere}```\n"


def copy_linked(page: Path, path: str) -> None:
    """Copy the files that a page links to and shows into the sources. Links to folders, which no page has, become text.

    page: the copy in the sources. path: the page's path in the repository.
    """

    def replaced(found: re.Match[str]) -> str:
        target = found["target"]
        if "://" in target:
            return found[0]
        file = Path(os.path.normpath(ROOT / Path(path).parent / target))
        if file.is_dir():
            return found["text"]
        copied = SOURCE / file.relative_to(ROOT)
        if file == ROOT / "README.md":
            return found[0].replace("README.md", HOME)
        if file.is_file() and file.suffix not in (".md", ".ipynb") and not copied.exists():
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copied)
        return found[0]

    page.write_text(_LINK.sub(replaced, page.read_text(encoding="utf-8")), encoding="utf-8")


def run_book() -> None:
    """Run Jupyter Book, and move its pages to SITE. Exits if it fails or warns, which it does for a broken link."""
    out = BUILD / "site-book"
    shutil.rmtree(out, ignore_errors=True)  # pages of code are not written anew
    book = str(PROGRAMS / "jupyter-book")
    command = [book, "build", str(SOURCE), "--path-output", str(out), "-W", "--keep-going"]
    packages = sysconfig.get_path("purelib")
    environment = os.environ | {"MINILLM_PACKAGES": packages, "TRITON_INTERPRET": "1", "PYTHONPATH": ""}
    with (BUILD / "site.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        lines = (BUILD / "site.log").read_text(encoding="utf-8").splitlines()
        told = [line for line in lines if "WARNING" in line or "ERROR" in line] or lines[-30:]
        sys.exit("\n".join([*told, f"all of it: {BUILD / 'site.log'}"]))
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.copytree(out / "_build" / "html", SITE)
    # Not in the sources: Jupyter Book would load them on every page.
    plotly = next(VENV.rglob("plotly/package_data/plotly.min.js"))
    for script in (plotly, ASSETS / "plots.js"):
        shutil.copy(script, SITE / "_static")
    for path in (SITE / "_static").glob("*-macros.html"):
        path.unlink()  # the theme's templates, not pages
    for path in (SITE / "_modules").rglob("*.html"):
        # viewcode takes all names of a file to be documented on one page: some of its links back would be broken.
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r'<a class="viewcode-back".*?</a>', "", text), encoding="utf-8")


if __name__ == "__main__":
    main()
