"""Where the data of the package are.

In a checkout, minillm/data and minillm/kernels are symbolic links to the project's folders. Where git makes no symbolic
links, as on Windows by default, they are files with the folder's path as text; then the folders themselves are used.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
LINKED = (PACKAGE / "kernels").is_dir()  # always, where the package is installed
LINKS = ("kernels", "data")
DATA = (PACKAGE if LINKED else PACKAGE.parent) / "data"
