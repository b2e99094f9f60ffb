"""Lessons that open in Colab: a badge, and a cell that installs the course there.

`minillm course export --repository URL` adds both to the notebooks without outputs. `tools/colab_steps.py` runs lessons
as Colab would, in a new environment; none was run in Colab itself.
"""

import re
from dataclasses import dataclass

import nbformat

from minillm.errors import ConfigError

_ADDRESS = re.compile(r"https://github\.com/([\w.-]+)/([\w.-]+?)(?:\.git)?/?")
# `google.colab` is imported by Colab's kernels alone. After a restart minillm is there, and nothing is installed again.
# The extra is not `course`: that has Jupyter itself, and would replace Colab's.
INSTALL = """\
# On Colab, this cell installs the course. Anywhere else it does nothing.
import importlib.util
import subprocess
import sys

if "google.colab" in sys.modules and importlib.util.find_spec("minillm") is None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "minillm[report] @ git+{address}@{branch}"], check=True)
    print("Installed. Now choose Runtime > Restart session, and run the lesson from the top.")"""


@dataclass(frozen=True)
class Repository:
    """A public repository on GitHub, the only host whose notebooks Colab opens by their address."""

    owner: str
    name: str
    branch: str = "main"

    @classmethod
    def at(cls, address: str, branch: str = "main") -> "Repository":
        """The repository at `https://github.com/OWNER/NAME`. Raises ConfigError for any other address."""
        if not (found := _ADDRESS.fullmatch(address)):
            raise ConfigError(
                f"Colab opens notebooks of repositories on GitHub: give https://github.com/OWNER/NAME, not {address}"
            )
        return cls(found[1], found[2], branch)

    @property
    def address(self) -> str:
        return f"https://github.com/{self.owner}/{self.name}"

    def colab_badge(self, lesson: str) -> str:
        """Markdown that opens `notebooks/clean/{lesson}` in Colab."""
        place = f"{self.owner}/{self.name}/blob/{self.branch}/notebooks/clean/{lesson}"
        picture = "https://colab.research.google.com/assets/colab-badge.svg"
        return f"[![Open in Colab]({picture})](https://colab.research.google.com/github/{place})"

    def binder_badge(self) -> str:
        """Markdown that opens all lessons in Binder."""
        place = f"{self.owner}/{self.name}/{self.branch}?urlpath=lab/tree/lab"
        return f"[![Open in Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/{place})"

    def prepare(self, notebook: nbformat.NotebookNode, lesson: str) -> None:
        """Add the badge below the lesson's title, and the cell that installs the course after it."""
        first = notebook.cells[0]
        title, _, text = first.source.partition("\n")
        first.source = f"{title}\n\n{self.colab_badge(lesson)}\n{text}"
        cell = nbformat.v4.new_code_cell(
            INSTALL.format(address=self.address, branch=self.branch), id="install-on-colab"
        )
        notebook.cells.insert(1, cell)
