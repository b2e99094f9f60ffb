"""Code written for vLLM: a script changes the line that imports, and the server and the command line translate too.

`from minillm.from_vllm import LLM, SamplingParams` imports subclasses of minillm's own classes. They take vLLM's names
and values of what minillm has too, and say what to do instead where it has nothing. docs/from_vllm.md sets both APIs
side by side.

Names and values of vLLM's belong here, and what to do instead where minillm lacks one. What minillm can do does not: no
feature is only here, and the engine and what is below it know nothing of this package.
"""

from typing import TYPE_CHECKING

from minillm.lazy_imports import exports

if TYPE_CHECKING:
    from .scripts import LLM, AsyncLLM, Completion, RequestOptions, SamplingParams, Tokenizer

__all__ = ["LLM", "AsyncLLM", "Completion", "RequestOptions", "SamplingParams", "Tokenizer"]

if not TYPE_CHECKING:  # a checker would take a module with `__getattr__` to have every name
    _load, __dir__ = exports(__name__, dict.fromkeys(__all__, "scripts"))

    def __getattr__(name):
        from .attributes import ATTRIBUTES  # only if it is asked for

        if instead := ATTRIBUTES[__name__].get(name):
            raise ImportError(f"{__name__} has no {name}: {instead}")
        return _load(name)
