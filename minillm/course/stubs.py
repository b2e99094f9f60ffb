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
        code = (getattr(method, "__code__", None) for method in vars(function).values())
        return engines_own if any(each and NotSolvedYet.__name__ in each.co_names for each in code) else function

    @functools.wraps(engines_own)
    def either(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except NotSolvedYet:
            return engines_own(*args, **kwargs)

    return either


def raise_if_stub(kernel: Kernel) -> None:
    """Raise NotSolvedYet if a Triton kernel is a stub.

    Call it before the launch: a compiled kernel cannot raise, and the interpreter wraps an exception in its own.
    """
    if NotSolvedYet.__name__ in kernel.fn.__code__.co_names:
        raise NotSolvedYet(kernel.fn.__name__)
