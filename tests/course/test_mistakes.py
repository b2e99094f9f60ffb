"""docs/mistakes.md is what tools/list_mistakes.py makes of the wrong solutions."""

import importlib.util
from pathlib import Path

import pytest

from minillm.course import triton_here
from minillm.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_the_list_of_mistakes_is_current():
    try:
        triton_here()
    except ConfigError:
        pytest.skip("kernels are compiled in this process: some mistakes exist only for interpreted ones")
    spec = importlib.util.spec_from_file_location("list_mistakes", ROOT / "tools" / "list_mistakes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == module.PAGE.read_text("utf-8"), "run python tools/list_mistakes.py"


def test_the_list_has_a_mistake_for_each_property_in_words_and_in_code():
    text = (ROOT / "docs" / "mistakes.md").read_text("utf-8")
    part = text.split("### `rms_norm`")[1].split("\n### ")[0].split("**eps is inside the root**")[1].split("**")[0]
    assert "Hint: it is added to the mean, before the root" in part
    assert "# forgets eps\nreturn (wide / wide.pow(2)" in part and "wide = x.float()" not in part
