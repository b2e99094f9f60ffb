"""Old names of modules and their members: they still work, with a DeprecationWarning."""

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import from_vllm

MODULES = {
    "minillm.async_engine": "minillm.engine.async_llm",
    "minillm.batch": "minillm.model.batch",
    "minillm.bench.build": "minillm.tuning.build",
    "minillm.bench.planning": "minillm.tuning.planning",
    "minillm.bench.tuning": "minillm.tuning.trials",
    "minillm.block_tables": "minillm.kv_cache.block_tables",
    "minillm.capture": "minillm.runner.cuda_graph",
    "minillm.graphs": "minillm.runner.decode_graphs",
    "minillm.layer_groups": "minillm.kv_cache.layer_groups",
    "minillm.llm": "minillm.engine.llm",
    "minillm.loader": "minillm.model.loader",
    "minillm.mixed_graphs": "minillm.runner.mixed_graphs",
    "minillm.output_text": "minillm.engine.output_text",
    "minillm.parts": "minillm.overrides",
    "minillm.plan": "minillm.runner.plan",
    "minillm.policies": "minillm.scheduler.policies",
    "minillm.sampler": "minillm.runner.sampler",
    "minillm.single_row": "minillm.model.single_row",
    "minillm.sizing": "minillm.model.sizing",
    "minillm.stateful": "minillm.scheduler.replaceable",
    "minillm.streams": "minillm.kv_cache.attention_sinks",
}


class _Finder(MetaPathFinder, Loader):
    """Finds a module by its old name and returns the same module object as the new name does."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if instead := from_vllm.MODULES.get(name.removeprefix("minillm.")) if name.startswith("minillm.") else None:
            raise ModuleNotFoundError(f"minillm has no module {name}: {instead}", name=name)
        return ModuleSpec(name, self) if name in MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MODULES[spec.name]
        warnings.warn(f"{spec.name} is {new} now", DeprecationWarning, stacklevel=2)
        module = import_module(new)
        self._specs[new] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]  # the import system has just put the old name's in its place


NAMES = {
    "minillm.config": {
        **dict.fromkeys(("ModelConfig", "PRESETS"), "minillm.model.config"),
        **dict.fromkeys(("ARCHITECTURES", "Family", "LLAMA", "NORMS", "layer_windows"), "minillm.model.families"),
        "RopeScaling": "minillm.model.rope_scaling",
    }
}


def names(module: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module whose names have moved elsewhere."""

    def find(name: str) -> Any:
        new = NAMES[module].get(name)
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is {new}.{name} now", DeprecationWarning, stacklevel=2)
        return getattr(import_module(new), name)

    return find


def install() -> None:
    """Make old module names importable; modules that exist take precedence."""
    sys.meta_path.append(_Finder())
