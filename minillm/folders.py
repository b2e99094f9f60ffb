"""The folders of the package and of its data, and how packages are installed there.

In a checkout, minillm/data and minillm/kernels are symbolic links to the project's folders. Where git makes no symbolic
links, as on Windows by default, they are files with the folder's path as text; then the folders themselves are used.
"""

import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
LINKED = (PACKAGE / "kernels").is_dir()  # always, where the package is installed
LINKS = ("kernels", "data")
DATA = (PACKAGE if LINKED else PACKAGE.parent) / "data"


def how_to_install(*names: str) -> str:
    """Return the command that installs packages. A checkout has its own, and there pip would take minillm from its
    index.
    """
    if (PACKAGE.parent / "Makefile").is_file():
        return "make setup"
    return "pip install " + " ".join(f"'{name}'" for name in names)


def import_path() -> str:
    """This process's import path as PYTHONPATH has it, so that a child imports the same minillm."""
    folders = [folder for folder in sys.path if folder and not folder.endswith(".zip")]
    return os.pathsep.join([*folders, str(PACKAGE.parent)])
