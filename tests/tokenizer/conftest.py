"""Every tokenizer layout, loaded from the same file by minillm and by the `tokenizers` library."""

import sys
from pathlib import Path

import pytest
import tokenizers

sys.path.insert(0, str(Path(__file__).parent))

from layouts import LAYOUTS  # noqa: E402

from minillm.tokenizer import Tokenizer  # noqa: E402


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    for name, make in LAYOUTS.items():
        make(root / name)
    return {name: root / name for name in LAYOUTS}


class Pair(tuple):
    """(minillm's tokenizer, the library's), with a short repr: the library's would print the whole file."""

    def __repr__(self):
        return "(minillm, tokenizers)"


@pytest.fixture(scope="session", params=LAYOUTS)
def pair(request, directories):
    directory = directories[request.param]
    theirs = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    return Pair((Tokenizer.from_pretrained(directory), theirs))


@pytest.fixture(scope="session")
def gemma(directories):
    return Tokenizer.from_pretrained(directories["gemma"])
