"""Open every page of the built site in headless Chromium, from its files, at the width of a desk and of a phone.

    pip install playwright    (in any environment; Chromium from the system)
    python tools/browse_site.py --browser /usr/bin/chromium --out build/pictures --picture index.html

Fails if a page is wider than its window, logs an error, or asks for anything that is not a file of the site.
"""

import argparse
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

SITE = Path(__file__).resolve().parents[1] / "build" / "site"
WIDTHS = {"desk": 1280, "phone": 390}  # CSS pixels
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def faults(page: Page, path: Path) -> list[str]:
    """What is wrong with a page at the present width."""
    told: list[str] = []
    listeners = {
        "console": lambda each: told.append(each.text) if each.type == "error" else None,
        "pageerror": lambda each: told.append(str(each)),
        "request": lambda each: None if each.url.startswith(("file:", "data:", "blob:")) else told.append(each.url),
        "requestfailed": lambda each: told.append(f"{each.url} failed"),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    page.goto(path.as_uri(), wait_until="load")
    shown, wide = page.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollWidth]")
    if wide > shown:
        told.append(f"{wide} pixels wide in a window of {shown}")
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--browser", default="/usr/bin/chromium", help="the program")
    parser.add_argument("--out", type=Path, default=SITE.parent / "pictures", help="where pictures go")
    parser.add_argument(
        "--picture", action="append", default=[], help="a page of which to save pictures, twice a width"
    )
    parser.add_argument("--only", help="only pages with this in their path")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    pages = [path for path in sorted(SITE.rglob("*.html")) if not options.only or options.only in str(path)]
    wrong = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=FLAGS)
        for theme in ("light", "dark"):
            for width, pixels in WIDTHS.items():
                context = browser.new_context(
                    viewport={"width": pixels, "height": 900}, color_scheme=theme, offline=True
                )
                page = context.new_page()
                for path in pages:
                    name = path.relative_to(SITE)
                    if theme == "dark" and str(name) not in options.picture:
                        continue
                    for line in faults(page, path):
                        wrong += 1
                        print(f"{name}, {width}, {theme}: {line}", flush=True)
                    if str(name) in options.picture:
                        picture = options.out / f"{str(name).replace('/', '-')}-{width}-{theme}.png"
                        page.screenshot(path=picture, full_page=True)
                context.close()
        browser.close()
    print(f"{len(pages)} pages, {wrong} faults")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
