"""One report of the embedded model, as short as it can be, for the tests of all its parts."""

import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from minillm.evaluate import load_text
from minillm.report.run import run

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """A page's elements: text and tables by section, and all attributes. `closed`: whether every tag was."""

    def __init__(self, source: str):
        super().__init__()
        self.section, self.open, self.wrong = "", [], []
        self.texts, self.tables, self.tags, self.attributes, self.css = {}, {}, [], [], ""
        self.feed(source)
        self.close()
        self.closed = not self.open and not self.wrong

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == "section":
            self.section = dict(attrs)["id"]
        if tag == "table":
            self.tables.setdefault(self.section, []).append([])
        if tag == "tr":
            self.tables[self.section][-1].append([])
        if tag in ("td", "th"):
            self.tables[self.section][-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.wrong.append(tag)

    def handle_data(self, data):
        if "style" in self.open:
            self.css += data
        self.texts[self.section] = self.texts.get(self.section, "") + data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[self.section][-1][-1][-1] += data

    def cells(self, section: str, table: int = 0) -> dict[str, list[str]]:
        """A table's rows by their first cells."""
        return {line[0]: line[1:] for line in self.tables[section][table]}


@pytest.fixture(scope="package")
def short():
    """A short text, so that comparisons are quick."""
    text = load_text()[:4000]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["minillm.evaluate.compare"], "load_text", lambda: text)
        yield


@pytest.fixture(scope="package")
def made(short, tmp_path_factory):
    """The embedded model's report with int8 and with a method that does not fit it: record, page, file, lines said."""
    file, said = tmp_path_factory.mktemp("report") / "page.html", []
    work = {"limit": 12, "scale": 64, "requests": 3, "price": 2.0, "device": "cpu"}
    record = run(None, out=file, quick=True, versions=["int8", "awq-g96"], say=said.append, **work)
    source = file.read_text(encoding="utf-8")
    return SimpleNamespace(record=record, source=source, page=Page(source), file=file, said=said)
