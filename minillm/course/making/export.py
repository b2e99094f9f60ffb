"""A learners' copy of the project: the package, its data and the notebooks, without solutions, sources and tests.

    minillm course export ../for_learners --repository https://github.com/OWNER/NAME

In the copy, `make lab`, `make demo`, the notebooks, their checkers and `minillm` work as they do here.
"""

import re
import shutil
from pathlib import Path

import nbformat

from minillm.errors import ConfigError
from minillm.folders import LINKS

from .colab import Repository

ROOT = Path(__file__).resolve().parents[3]
FILES: tuple[str, ...] = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile")
FILES += ("make.py", "setup.py", "pyproject.toml", "requirements.lock", "environment.yml")
FILES += ("requirements-ray.lock",)
FILES += ("Dockerfile", ".dockerignore")
FOLDERS = ("minillm", "kernels", "data", "docs", "binder")
LEFT_OUT = ("__pycache__", ".ipynb_checkpoints", ".DS_Store")
INSTRUCTORS = ("docs/talking_points.md", "docs/instructors.md", "docs/grading.md")
FOR_TESTS = ("data/checkpoints",)
# What the README says of teaching, and of commands that need the rest of the project, is left out.
NOT_FOR_LEARNERS = ("docs/instructors.md", "`make site`", "`make check`", "`make triton`")
_LINK = re.compile(r"(?<!!)\[([^\]\[]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")  # [text](path#section), not of another site


def export(folder: Path, root: Path = ROOT, repository: Repository | None = None) -> list[str]:
    """Write the copy into `folder`, which must be new or empty, and return the names at its top.

    repository: where the copy will be published. Its README and its notebooks without outputs then open in Colab, and
    the README in Binder.
    Raises ConfigError if it is not empty, if it is inside the project's own folders, or if the package was installed
    without the rest of the project.
    """
    lessons = sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    if not lessons or not (root / "Makefile").exists():
        raise ConfigError(f"{root} has no notebooks to copy: run this in the project's repository")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: name a new folder")
    inside = folder.resolve()
    if any(inside.is_relative_to(root / name) for name in (*FOLDERS, "notebooks")):
        raise ConfigError(f"{folder} is inside a folder that is copied: name one elsewhere")
    (folder / "notebooks").mkdir(parents=True)
    for name in FILES:
        if (root / name).exists():
            shutil.copy2(root / name, folder / name)
    hidden = {root / name for name in (*INSTRUCTORS, *FOR_TESTS)}

    def left_out(parent: str, names: list[str]) -> set[str]:
        return {name for name in names if name in LEFT_OUT or Path(parent) / name in hidden}

    for name in FOLDERS:
        shutil.copytree(root / name, folder / name, symlinks=True, ignore=left_out)
    for name in LINKS:  # a checkout without links has text in their place; the copy may go to a system that has links
        if not (link := folder / "minillm" / name).is_dir():
            link.unlink()
            try:
                link.symlink_to(f"../{name}", target_is_directory=True)
            except OSError:  # Windows, without the right to make one
                link.write_text(f"../{name}", encoding="utf-8")
    for path in lessons:
        shutil.copy2(path, folder / "notebooks" / path.name)
    shutil.copytree(root / "notebooks" / "clean", folder / "notebooks" / "clean", ignore=left_out)
    for page in [*folder.glob("*.md"), *(folder / "docs").glob("*.md"), *(folder / "data").glob("*.md")]:
        page.write_text(_for_learners(page), encoding="utf-8")
    if repository is not None:
        _publish(folder, repository)
    return sorted(each.name for each in folder.iterdir())


def _publish(folder: Path, repository: Repository) -> None:
    """Add what opens the copy's lessons in Colab and Binder."""
    lessons = sorted((folder / "notebooks" / "clean").glob("[0-9][0-9]_*.ipynb"))
    for path in lessons:
        notebook = nbformat.read(path, as_version=4)
        repository.prepare(notebook, path.name)
        nbformat.write(notebook, path)
    readme = folder / "README.md"
    title, _, text = readme.read_text(encoding="utf-8").partition("\n")
    badges = f"{repository.colab_badge(lessons[0].name)} {repository.binder_badge()}"
    readme.write_text(f"{title}\n\n{badges}\n{text}", encoding="utf-8")


def _for_learners(page: Path) -> str:
    """A page's text without paragraphs for instructors, and without links to what the copy lacks."""
    text = page.read_text(encoding="utf-8")
    if page.name == "README.md":
        text = "\n\n".join(each for each in text.split("\n\n") if not any(word in each for word in NOT_FOR_LEARNERS))
        text = re.sub(r"^make test .*\n", "", text, flags=re.MULTILINE)
    return _LINK.sub(lambda link: link[0] if (page.parent / link[2]).exists() else link[1], text)
