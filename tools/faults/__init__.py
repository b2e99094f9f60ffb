"""Faults that a programmer could make, for `tools/plant_faults.py` to plant: one module per package of minillm.

What an operator can do to any code, such as `<` that becomes `<=`, `mutations` does: here are faults with a meaning.
"""

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

TOP = "top_level"  # the room of modules directly in the minillm package


class StaleFault(ValueError):
    """A fault whose snippet does not occur exactly once in its file: the code has changed, so the fault must too."""


@dataclass(frozen=True)
class Fault:
    """One edit that breaks the project, and the tests that should fail because of it.

    name: what goes wrong. file: path from the project root. old: code that occurs there exactly once; new: its
    replacement. tests: pytest arguments in one string, selecting tests that take only seconds.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def room(self) -> str:
        parts = Path(self.file).parts
        if parts[0] == "kernels":
            return "kernels"
        return parts[1] if parts[0] == "minillm" and len(parts) > 2 else TOP

    def plant(self, text: str) -> str:
        """Return the file's text with the fault in it. Raises StaleFault."""
        if (count := text.count(self.old)) != 1:
            raise StaleFault(f"{self.name}: the snippet occurs {count} times in {self.file}, not once: {self.old!r}")
        return text.replace(self.old, self.new)


def every() -> list[Fault]:
    """All faults written by hand, room by room."""
    modules = sorted({module.name for module in pkgutil.iter_modules(__path__)} - {"mutations"})
    return [fault for name in modules for fault in import_module(f"{__name__}.{name}").FAULTS]
