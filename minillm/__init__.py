"""minillm: an LLM inference engine to learn from and to use."""

from typing import TYPE_CHECKING

from . import folders
from .lazy_imports import exports
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .engine.async_llm import AsyncLLM
    from .engine.llm import LLM
    from .errors import ConfigError, InvalidRequest, MinillmError
    from .overrides import NotSolvedYet, using
    from .request import Completion, RequestOptions, SamplingParams
    from .tokenizer import Tokenizer

if not folders.LINKED:
    __path__.append(str(folders.PACKAGE.parent))  # where `kernels` is
__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "ConfigError",
    "InvalidRequest",
    "MinillmError",
    "NotSolvedYet",
    "RequestOptions",
    "SamplingParams",
    "Tokenizer",
    "using",
]

if not TYPE_CHECKING:  # a checker would take a module with `__getattr__` to have every name
    __getattr__, __dir__ = exports(
        __name__,
        {
            "LLM": "engine.llm",
            "AsyncLLM": "engine.async_llm",
            "SamplingParams": "request",
            "Completion": "request",
            "RequestOptions": "request",
            "ConfigError": "errors",
            "InvalidRequest": "errors",
            "MinillmError": "errors",
            "Tokenizer": "tokenizer",
            "NotSolvedYet": "overrides",
            "using": "overrides",
        },
    )
