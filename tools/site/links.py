"""Check built pages: internal links, images, and that no page loads anything from elsewhere."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
NOT_LOADED = {"search", "canonical", "next", "prev", "author", "index", "copyright"}  # values of a link's `rel`
_IN_STYLE = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")
_IN_SCRIPT = re.compile(r"""(?:import\(|\bfrom\s+)["'](https?:[^"']+)""")


def problems(site: Path) -> list[str]:
    """One line for each broken internal link, missing file, and resource from elsewhere, in all of a folder's pages."""
    pages = {path: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser") for path in site.rglob("*.html")}
    names = {path: _anchors(page) for path, page in pages.items()}
    found = []
    for path, page in pages.items():
        for what, target in _targets(page):
            if problem := _problem(path, what, target, site, names):
                found.append(f"{path.relative_to(site)}: {problem}")
    for path in site.rglob("*.css"):
        for target in _in_style(path.read_text(encoding="utf-8")):
            if problem := _problem(path, "style", target, site, names):
                found.append(f"{path.relative_to(site)}: {problem}")
    return sorted(set(found))


def _anchors(page: BeautifulSoup) -> set[str]:
    return {each[name] for name in ("id", "name") for each in page.find_all(attrs={name: True})}


def _targets(page: BeautifulSoup):
    """(kind of element, address) for all that a page links to or loads."""
    for each in page.find_all("a", href=True):
        yield "a", each["href"]
    for tag, attribute in LOADED.items():
        for each in page.find_all(tag, attrs={attribute: True}):
            if tag != "link" or not NOT_LOADED & set(each.get("rel", [])):
                yield tag, each[attribute]
    for each in page.find_all("style"):
        yield from (("style", target) for target in _in_style(each.get_text()))
    for each in page.find_all("script", src=False):
        yield from (("script", target) for target in _IN_SCRIPT.findall(each.get_text()))


def _in_style(text: str) -> list[str]:
    return [one or other for one, other in _IN_STYLE.findall(text)]


def _problem(page: Path, what: str, target: str, site: Path, names: dict[Path, set[str]]) -> str | None:
    parts = urlsplit(target)
    if parts.scheme == "data" or (what == "a" and parts.scheme in ("http", "https", "mailto")):
        return None
    if parts.scheme or parts.netloc:
        return f"<{what}> loads {target}: copy it into the site"
    file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if file.is_dir():
        file /= "index.html"
    if not file.is_relative_to(site.resolve()) or not file.is_file():
        return f"<{what}> names {target}, which does not exist"
    anchor = unquote(parts.fragment)
    if what == "a" and anchor and file.suffix == ".html" and anchor not in names.get(file, set()):
        return f"<a> names {target}, and that page has no #{anchor}"
    return None
