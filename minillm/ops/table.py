"""The table of operations: each name and the function that currently implements it.  Lessons 00 and 04.

Every operation has a reference in plain torch (`reference.py`, the executable specification). A device may have a
faster function (`cpu.py`, `triton.py`), and `minillm.using` replaces it with a user-supplied one. Engines that were
made with `exact=True` share a set of their own (`exact.py`, `exact_triton.py`).
"""

import importlib
import inspect
import threading
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from minillm.kv_cache.layer_cache import LayerCache
from minillm.overrides import OverrideError, Parts, Used, register

from . import reference
from .compositions import COMPOSITIONS, Compositions
from .signatures import OPERATIONS, AttentionOptions, Rows, Truncation
from .split_keys import FUSED

# What an attention function that takes tensors gets by keyword.
OPTION_NAMES = ("max_queries", *(field.name for field in fields(AttentionOptions)))


def names() -> tuple[str, ...]:
    """Return the names of all operations."""
    return OPERATIONS


class OperationSet(Compositions):
    """The current functions of one type of device, `ops.on("cpu").linear(x, weight)`, and compositions of them.

    exact: a token's result has the same bits whatever else a step computes.
    """

    def __init__(self, device: str, exact: bool = False):
        self.device, self.exact = device, exact
        functions, origin = {}, {}
        module, why_not = _module(device, exact)
        why = "the same bits in every step" if exact else f"faster on {device}"
        for name in OPERATIONS:
            fast = getattr(module, name, None)
            functions[name] = fast or getattr(reference, name)
            if module is not None and fast:
                origin[name] = (module.__name__.rsplit(".", 1)[-1], why)
            else:
                origin[name] = ("reference", why_not or "the reference is as fast here")
        self.fused = {name: getattr(module, name) for name in (*COMPOSITIONS, *FUSED) if hasattr(module, name)}
        super().__init__(functions, origin)

    @classmethod
    def of(cls, device: str, exact: bool = False) -> Self:
        """Return the set of one type of device. (The operations are attributes, which `Parts` sets: no method is
        abstract.)
        """
        return cls(device, exact)

    def replacement(self, name: str, function: Callable, used: Used, capturable: bool) -> Callable:
        if self.exact:
            function = _refused(name)
        return super().replacement(name, _with_options(name, function), used, capturable)


def _refused(name: str) -> Callable:
    """Return what runs in place of a user-supplied operation in an exact engine: other engines may run it meanwhile."""

    def refuse(*arguments: object) -> NoReturn:
        raise OverrideError(
            f"an engine with exact=True does not run a user-supplied {name}: that may give a token other bits in other "
            "steps; make the engine without exact"
        )

    return refuse


def _with_options(name: str, function: Callable) -> Callable:
    """Return a user-supplied operation with the engine's signature.

    A function sample(logits, temperature, uniform) gets logits that are -inf where truncation leaves them out.
    An attention function may take tensors in place of `Rows`, and its options as keywords, of which it needs only those
    that the model has: decode_attention(q, cache, block_table, lengths, *, scale), with window=, soft_cap= and rotary=
    if the model has them, and prefill_attention(q, cache, block_table, lengths, query_start, *, max_queries, scale).
    Raises OverrideError for such a function with other arguments.
    """
    if name == "sample":
        return function if _takes_truncation(function) else _after_truncation(function)
    if name not in ("decode_attention", "prefill_attention") or _takes_rows(name, function):
        return function

    def by_keyword(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
        arguments: list[Any] = [q, cache, rows.block_table, rows.lengths]
        more = options.keywords()
        if name == "prefill_attention":
            arguments.append(rows.query_start)
            more["max_queries"] = rows.max_queries
        return function(*arguments, **more)

    return by_keyword


def _after_truncation(function: Callable) -> Callable:
    def sample(logits: Tensor, temperature: Tensor, uniform: Tensor, truncation: Truncation | None = None) -> Tensor:
        if truncation is not None:
            divisor = torch.where(temperature > 0, temperature, 1.0).double()
            left_out = reference.truncate(logits.double() / divisor[:, None], truncation) == -torch.inf
            logits = logits.masked_fill(left_out, -torch.inf)
        return function(logits, temperature, uniform)

    return sample


def _takes_truncation(function: Callable) -> bool:
    """Return whether a function in place of `sample` takes four arguments, not three; True if that is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    for count in (4, 3):
        try:
            signature.bind(*range(count))
            return count == 4
        except TypeError:
            pass
    raise OverrideError(
        f"sample cannot be a function of ({', '.join(signature.parameters)}): it is called as "
        "sample(logits, temperature, uniform, truncation), or as sample(logits, temperature, uniform)"
    )


def _takes_rows(name: str, function: Callable) -> bool:
    """Return whether an attention function takes `Rows`, not tensors and keywords; True if that is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    parameters = signature.parameters
    kinds = {each.kind for each in parameters.values()}
    by_name = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    takes_rows = "lengths" not in parameters and (inspect.Parameter.VAR_POSITIONAL in kinds or not kinds & by_name)
    tensors = 5 if name == "prefill_attention" else 4
    named = {} if takes_rows else {each: None for each in OPTION_NAMES if each in parameters}
    try:
        signature.bind(*range(4 if takes_rows else tensors), **named)
    except TypeError as error:
        more = ", query_start, *, max_queries" if tensors == 5 else ", *"
        raise OverrideError(
            f"{name} cannot be a function of ({', '.join(parameters)}): it is called as {name}(q, cache, rows, "
            f"options) with an `ops.Rows`, or as {name}(q, cache, block_table, lengths{more}, scale, ...)"
        ) from error
    return takes_rows


def _module(device: str, exact: bool) -> tuple[ModuleType | None, str]:
    modules = {"cpu": "exact", "cuda": "exact_triton"} if exact else {"cpu": "cpu", "cuda": "triton"}
    wanted = modules.get(device)
    if wanted is None:
        return None, f"no faster functions for {device}"
    try:
        return importlib.import_module(f".{wanted}", __package__), ""
    except ImportError as error:
        return None, f"{wanted} functions cannot be imported ({error})"


_sets: dict[tuple[str, bool], OperationSet] = {}
_lock = threading.RLock()


def on(device: str, exact: bool = False) -> OperationSet:
    """Return the operations of a device type ("cpu", "cuda"): one set per type, shared by all engines.  Lesson 00.

    exact: the set that all engines with `exact=True` share.
    """
    with _lock:
        if (device, exact) not in _sets:
            _sets[device, exact] = OperationSet.of(device, exact)
        return _sets[device, exact]


@register
def _sets_here() -> list[Parts]:
    wanted = {("cpu", False), *_sets} | ({("cuda", False)} if torch.cuda.is_available() else set())
    return [on(*each) for each in sorted(wanted)]


def table(device: str = "cpu", exact: bool = False) -> list[dict[str, str]]:
    """Return every operation as {"name", "runs", "why", "signature"}: which implementation runs, and why.  Lesson
    00.
    """
    operations = on(device, exact)
    return [
        {
            "name": name,
            "runs": operations.origin[name][0],
            "why": operations.origin[name][1],
            "signature": f"{name}{inspect.signature(getattr(reference, name))}",
        }
        for name in OPERATIONS
    ]
