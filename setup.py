"""Packs kernels/ and data/ also where git has made no symbolic links: there, minillm/kernels and minillm/data are text.

Everything else is in pyproject.toml.
"""

import shutil
from glob import glob
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class WithoutLinks(build_py):
    """Copies the files that the links would have led to."""

    def run(self) -> None:
        super().run()
        if self.editable_mode or (ROOT / "minillm" / "kernels").is_dir():
            return
        wanted = ["kernels/*.py", *(each for each in self.package_data["minillm"] if each.startswith("data/"))]
        for name in found(wanted) - found(self.exclude_package_data["minillm"]):
            copy = Path(self.build_lib, "minillm", name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy)


def found(patterns: list[str]) -> set[str]:
    """Files in the project's folder."""
    names = {name for each in patterns for name in glob(each, root_dir=ROOT, recursive=True)}
    return {name for name in names if (ROOT / name).is_file()}


setup(cmdclass={"build_py": WithoutLinks})
