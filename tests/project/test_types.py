"""The package type-checks, and so does user code that calls the public classes."""

import re
import subprocess
import sys
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from minillm.config import EngineConfig, EngineOptions

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.proof  # `make check` runs mypy too

PUBLIC = ("LLM", "AsyncLLM", "SamplingParams")
WRONG = {
    'LLM("x", max_num_seqs="a")': '"max_num_seqs"',
    'LLM("x", max_num_seq=4)': '"max_num_seq"',
    'LLM("x", policy="lifo")': '"policy"',
    'LLM("x", tokenizer=5)': '"tokenizer"',
    'AsyncLLM("x", max_num_seqs="a")': '"max_num_seqs"',
    'AsyncLLM("x", max_num_seq=4)': '"max_num_seq"',
    "LLM().generate(5)": '"generate"',
    "SamplingParams(max_token=5)": '"max_token"',
    "minillm.LML": '"LML"',
}
RIGHT = (
    'LLM(dtype=torch.float32, device=torch.device("cpu"), max_num_seqs=4, policy="priority", trace=Trace())',
    'LLM().generate(["a", "b"], SamplingParams(stop="c"), [RequestOptions(), RequestOptions()])[0].token_ids',
    "LLM().generate([[5, 6], [7]])",
    'LLM().chat([{"role": "user", "content": "hello"}])',
)


def mypy(*arguments: str) -> tuple[int, str]:
    """mypy's exit status and output with the project's settings."""
    command = [sys.executable, "-m", "mypy", "--no-pretty", "--hide-error-context", "--no-error-summary", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return found.returncode, found.stdout + found.stderr


@pytest.fixture(scope="module")
def messages(tmp_path_factory) -> dict[str, list[str]]:
    """mypy's messages for each line that a user might write."""
    lines = [f"reveal_type({name})" for name in PUBLIC]
    lines += [*WRONG, *RIGHT]
    head = "import minillm, torch; from minillm import *; from minillm.trace import Trace"
    path = tmp_path_factory.mktemp("types") / "snippet.py"
    path.write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
    found: dict[str, list[str]] = {line: [] for line in lines}
    # From mypy's cache come the messages of an earlier run, with the path that an equal file had then.
    for number, message in re.findall(rf"^.*{path.name}:(\d+): (.*)$", mypy(str(path))[1], re.MULTILINE):
        found[lines[int(number) - 2]].append(message)
    return found


def test_every_module_of_the_package_type_checks():
    status, said = mypy()
    assert status == 0, said


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_its_class_for_a_type_checker(messages, name):
    (message,) = messages[f"reveal_type({name})"]
    assert message.startswith('note: Revealed type is "def (') and f".{name}" in message.split("->")[-1]


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_argument_is_an_error(messages, line):
    assert messages[line] and WRONG[line] in messages[line][0] and messages[line][0].startswith("error")


@pytest.mark.parametrize("line", RIGHT)
def test_a_correct_argument_is_not_an_error(messages, line):
    assert messages[line] == []


def test_the_options_of_the_public_classes_are_the_fields_of_the_engine_config():
    options = get_type_hints(EngineOptions, localns={"torch": torch})
    stored = get_type_hints(EngineConfig)
    assert list(options) == [each.name for each in fields(EngineConfig)]
    for name, kind in stored.items():
        allowed = {*get_args(options[name]), options[name]}
        assert {*get_args(kind), kind} & allowed, f"{name}: {kind}, but {options[name]}"
    paths = {name for name, kind in options.items() if PathLike[str] in get_args(kind)}
    assert paths == {"plan", "trace", "speculate", "speculate_head"}
