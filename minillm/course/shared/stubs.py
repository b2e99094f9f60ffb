"""The learner's own function once it is written; until then, the engine's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

from minillm.overrides import NotSolvedYet, using
from minillm.request import SamplingParams

if TYPE_CHECKING:
    from minillm import LLM


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
    """Return whether a function, a class or a kernel is written: none of its code raises NotSolvedYet.  Lesson 00.

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


def same_text_with(llm: LLM, prompt: str) -> Callable[..., None]:
    """A function that runs the engine with a learner's operations and without, and prints whether the texts agree.

    same_text(tokens=12, gated_activation=mine, ...): `tokens` are generated after `prompt`, greedily.  Lesson 03.
    """

    def same_text(tokens: int = 12, **operations: Any) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0)
        expected = llm.generate(prompt, params)[0].text
        with using(**operations) as used:
            found = llm.generate(prompt, params)[0].text
        if any(used.calls.values()):
            print("calls of your functions:", dict(used.calls))
            print(f"the same text as without them: {found == expected}: {prompt + found!r}")
        else:
            print("not solved yet: the engine ran its own operations")

    return same_text
