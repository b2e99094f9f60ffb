"""minillm: an LLM inference engine to learn from and to use."""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_engine",
    "SamplingParams": "request",
    "Completion": "request",
    "InvalidRequest": "request",
    "Tokenizer": "tokenizer",
    "NotSolvedYet": "parts",
    "using": "parts",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    """Import on first use: `import minillm` alone does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'minillm' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
