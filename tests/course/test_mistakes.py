"""The list of common mistakes that tools/list_mistakes.py makes of the wrong solutions."""

import importlib.util
from pathlib import Path

import pytest

from minillm.course import triton_here
from minillm.course.shared import checks
from minillm.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def page():
    try:
        triton_here()
    except ConfigError:
        pytest.skip("kernels are compiled in this process: some mistakes exist only for interpreted ones")
    spec = importlib.util.spec_from_file_location("list_mistakes", ROOT / "tools" / "list_mistakes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.page()


def test_the_list_has_every_exercise_and_each_property_with_its_hint(page):
    assert page.count("\n### ") == len(checks.every())
    assert page.count("\nHint: ") == sum(len(each.properties) - 1 for each in checks.every().values())


def test_a_mistake_is_listed_in_words_and_in_code(page):
    part = page.split("### `rms_norm`")[1].split("\n### ")[0].split("**eps is inside the root**")[1].split("**")[0]
    assert "Hint: it is added to the mean, before the root" in part
    assert "# forgets eps\nreturn (wide / wide.pow(2)" in part and "wide = x.float()" not in part
