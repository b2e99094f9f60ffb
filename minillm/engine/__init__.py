"""The engine loop, and `LLM` and `AsyncLLM` around it.  Lessons 00, 10 and 99.

What turns prompts into requests, and steps into text, belongs here. Which tokens run (`scheduler`), and how they run
(`runner`), does not.
"""

from typing import TYPE_CHECKING

from minillm.lazy_imports import exports

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .engine import Engine
    from .llm import LLM
    from .output_text import OutputText

__all__ = ["AsyncLLM", "Engine", "LLM", "OutputText"]

if not TYPE_CHECKING:  # a checker would take a module with `__getattr__` to have every name
    __getattr__, __dir__ = exports(
        __name__,
        {
            "AsyncLLM": "async_llm",
            "Engine": "engine",
            "LLM": "llm",
            "OutputText": "output_text",
        },
    )
