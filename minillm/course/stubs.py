"""The learner's own function once it is written; until then, the engine's."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol

from minillm.overrides import NotSolvedYet


class Kernel(Protocol):
    """A Triton kernel, compiled or interpreted: a wrapper of a Python function."""

    @property
    def fn(self) -> FunctionType: ...


def yours(function: Callable[..., Any], engines_own: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `function`, or `engines_own` as long as `function` is a stub.  Lesson 00.

    Given a class: the class itself, or `engines_own` as long as one of its methods is a stub.
    """
    if isinstance(function, type):
        return function if solved(function) else engines_own

    @functools.wraps(engines_own)
    def either(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except NotSolvedYet:
            return engines_own(*args, **kwargs)

    return either


def solved(part: Callable[..., Any] | Kernel) -> bool:
    """Whether a function, a class or a kernel is written: none of its code raises NotSolvedYet.  Lesson 00.

    A lesson that labels a result asks it: a result of the engine's own part must not be called the learner's.
    """
    inner = getattr(part, "fn", part)
    parts = vars(inner).values() if isinstance(inner, type) else [inner]
    codes = (getattr(each, "__code__", None) for each in parts)
    return not any(code and NotSolvedYet.__name__ in code.co_names for code in codes)


def raise_if_stub(kernel: Kernel) -> None:
    """Raise NotSolvedYet if a Triton kernel is a stub.

    Call it before the launch: a compiled kernel cannot raise, and the interpreter wraps an exception in its own.
    """
    if not solved(kernel):
        raise NotSolvedYet(kernel.fn.__name__)
