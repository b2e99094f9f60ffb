"""Public names of a package, imported on first use: `import minillm` alone does not wait for torch."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package whose public names live in its modules.

    homes: name -> the module it lives in, relative to the package. The package states the same names under
    `TYPE_CHECKING`, where type checkers and editors look for them.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
        return getattr(import_module(f".{homes[name]}", package), name)

    return load, lambda: sorted(homes)
