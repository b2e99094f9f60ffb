"""Faults that a programmer could make, as data: what `tools/plant_faults.py` plants, a module a room of the package."""

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

TOP = "top_level"  # the room of the modules that lie in the package itself


class StaleFault(ValueError):
    """A fault whose snippet is not in its file once: the code has moved on, and the fault must follow it."""


@dataclass(frozen=True)
class Fault:
    """One edit that breaks the project, and the tests that should notice.

    name: what breaks. file: from the project's root. old: code that stands there once; new: what takes its place.
    tests: pytest's arguments in one string, few enough to run in seconds.
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
        return parts[1] if len(parts) > 2 else TOP

    def plant(self, text: str) -> str:
        """The file's text with the fault in it. Raises StaleFault."""
        if (count := text.count(self.old)) != 1:
            raise StaleFault(f"{self.name}: {self.file} has its snippet {count} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)


def every() -> list[Fault]:
    """All faults, room by room."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [fault for name in modules for fault in import_module(f"{__name__}.{name}").FAULTS]
