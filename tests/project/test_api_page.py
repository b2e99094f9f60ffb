"""docs/api.md is what tools/list_api.py makes of the docstrings, and has every public name."""

from pathlib import Path

import minillm
from tools import list_api

ROOT = Path(__file__).resolve().parents[2]
PAGE = list_api.PAGE.read_text(encoding="utf-8")


def test_the_page_is_current():
    assert list_api.page() == PAGE, "run python tools/list_api.py"


def test_it_has_every_public_name_and_option():
    assert all(f"## `{name}`\n" in PAGE for name in minillm.__all__)
    assert all(f"\n{name} " in PAGE for name in ("max_num_seqs", "kv_cache_dtype", "top_p", "json_schema", "priority"))
    assert "### `LLM.generate`" in PAGE and "`decode_attention`" in PAGE


def test_a_signature_is_that_of_the_source():
    def found(a, /, b: int, c: str = "x", *rest, d=None, **more) -> list[int]: ...

    assert list_api.signature(found, "found") == ("found(a, b: int, c: str = 'x', *rest, d=None, **more) -> list[int]")


def test_the_readme_links_to_it():
    assert "(docs/api.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
