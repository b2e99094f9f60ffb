"""What pyproject.toml cannot say.

* kernels/ and data/ are packed also where git has made no symbolic links: there, minillm/kernels and minillm/data are
  text.
* A wheel's project URLs are those of the public repository that the checkout was cloned from, if there is one: a fork
  or a class's copy names itself.
"""

import re
import shutil
import subprocess
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


def project_urls() -> dict[str, str]:
    """The repository's pages, from git's `origin`: `https://HOST/PATH`, `git@HOST:PATH` or `ssh://git@HOST/PATH`."""
    command = ["git", "remote", "get-url", "origin"]
    if not (ROOT / ".git").exists():  # git would look in the folders above
        return {}
    try:
        origin = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or not cloned
        return {}
    if not (
        found := re.fullmatch(r"(?:https://|ssh://git@|git@)([\w-]+(?:\.[\w-]+)+)[:/]([\w./-]+?)(?:\.git)?/?", origin)
    ):
        return {}  # a folder, or an address that has a password in it
    page = f"https://{found[1]}/{found[2]}"
    if found[1] != "github.com":  # other hosts' pages have other addresses
        return {"Repository": page}
    files = {"Documentation": "README.md", "Changelog": "CHANGELOG.md"}
    return {"Repository": page} | {name: f"{page}/blob/HEAD/{file}" for name, file in files.items()}


setup(cmdclass={"build_py": WithoutLinks}, project_urls=project_urls())
