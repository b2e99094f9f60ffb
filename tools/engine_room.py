"""Use the server's page in a headless browser: send prompts, and see tokens, rows and blocks appear.

    pip install playwright pillow    (in any environment; Chromium from the system)
    python tools/engine_room.py --python .venv/bin/python --browser /usr/bin/chromium --out build/engine_room

Not part of the test suite, because it needs a browser. It saves screenshots of a desktop's and a phone's size, light
and dark, and fails when the page shows something wrong or the browser reports an error.
"""

import argparse
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
KEY = "a-key-for-this-page"
DESKTOP, PHONE = {"width": 1280, "height": 1190}, {"width": 390, "height": 844}
TIMEOUT = 60_000  # milliseconds
PROMPT = "Long ago, the people of the island of Sorn told one another how the first boat was built, and why"

STORY = " ".join(
    ["The harbor of Sorn has a lighthouse, and its keeper writes down every boat that comes and goes."] * 4
)


@contextmanager
def serving(python: str, *options: str) -> Iterator[str]:
    """Run a server with the embedded model, and yield its address."""
    command = [python, "-m", "minillm.cli", "serve", "--port", "0", "--device", "cpu", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"(http://\S+)/v1", server.stdout.readline())
            assert found is not None, "the server did not start"
            yield found[1]
        finally:
            server.terminate()
            server.wait()


@contextmanager
def opened(browser: Browser, url: str, size: dict, scheme: str = "light", scale: int = 2) -> Iterator[Page]:
    """The page in a window of this size. Fails if the browser reports an error."""
    page = browser.new_page(viewport=size, color_scheme=scheme, device_scale_factor=scale)
    page.set_default_timeout(TIMEOUT)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(url)
    yield page
    page.close()
    wrong = [error for error in errors if "401" not in error]  # the page finds out by asking that it needs a key
    assert not wrong, wrong


def send(page: Page, prompt: str, answers: int, tokens: int) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_label("Answers", exact=True).fill(str(answers))
    page.get_by_label("Most tokens").fill(str(tokens))
    page.get_by_label("Go on after the end of the text").check()
    page.get_by_label("Prompt", exact=True).press("Control+Enter")


def number(page: Page, name: str) -> int:
    return int(page.locator(f"#{name}").inner_text().replace(",", ""))


def used(page: Page) -> int:
    return int(re.search(r"([\d,]+) used", page.locator("#blocks-text").inner_text())[1].replace(",", ""))


def wide(page: Page) -> bool:
    """Whether the page is wider than the window, and so would have to be scrolled sideways."""
    return page.evaluate("document.documentElement.scrollWidth > window.innerWidth")


def use(browser: Browser, url: str, out: Path) -> None:
    """One run on a desktop: idle, then a batch, then stopped, then idle again."""
    with opened(browser, url, DESKTOP) as page:
        expect(page.locator("#status")).to_have_text("live")
        assert number(page, "running") == 0 and used(page) == 0
        page.screenshot(path=out / "1-idle.png")
        send(page, PROMPT, 6, 900)
        expect(page.locator("#rows tr")).to_have_count(6)
        expect(page.locator("#output li").first).to_have_text(re.compile(r"\w+ \w+"))
        expect(page.locator("#timing")).to_have_text(re.compile(r"First token after .* tokens, \d+ tokens/s"))
        before, text = used(page), page.locator("#output li").first.inner_text()
        page.wait_for_function("before => !document.querySelector('#blocks-text').textContent.includes(before)",
                               arg=f" {before} used")  # fmt: skip
        assert used(page) > before > 0 and len(page.locator("#output li").first.inner_text()) > len(text)
        assert number(page, "running") == 6
        page.locator("#rows tr").nth(2).focus()
        expect(page.locator("#rows tr.lit")).to_have_count(1)
        page.screenshot(path=out / "2-row.png")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#timing")).to_contain_text("stopped")
        expect(page.locator("#rows tr")).to_have_count(0)
        expect(page.locator("#blocks-text")).to_contain_text(" 0 used")
        page.get_by_role("button", name="Pause").press("Enter")
        expect(page.locator("#status")).to_have_text("paused")
        assert not wide(page)


def crowded(browser: Browser, url: str, out: Path) -> None:
    """A batch that is full, with others waiting, on a desktop; then on a phone; in both color schemes."""
    with opened(browser, url, DESKTOP) as crowd, opened(browser, url, DESKTOP) as late:
        for first in ("The market of Sorn", "Once upon a time"):  # leaves cached blocks
            send(late, first, 6, 90)
            expect(late.locator("#timing")).to_contain_text("540 tokens")
            expect(late.locator("#stop")).to_be_disabled()
        send(crowd, STORY, 8, 900)
        expect(crowd.locator("#rows tr")).to_have_count(8)
        for scheme, size, name in (
            ("light", DESKTOP, "3-desktop"),
            ("dark", DESKTOP, "4-desktop-dark"),
            ("light", PHONE, "5-phone"),
            ("dark", PHONE, "6-phone-dark"),
        ):
            with opened(browser, url, size, scheme, scale=1 if name == "3-desktop" else 2) as page:
                expect(page.locator("#status")).to_have_text("live")
                page.wait_for_timeout(3000)  # for a history to draw
                send(page, PROMPT, 4, 900)
                expect(page.locator("#timing")).to_have_text(re.compile(r"tokens/s"))
                if name == "3-desktop":
                    send(late, STORY, 6, 700)
                    expect(page.locator("#rows tr")).to_have_count(16)
                    expect(page.locator("#waiting")).to_have_text("2")
                page.get_by_label("Prompt", exact=True).blur()
                page.wait_for_timeout(4000)
                assert not wide(page), f"{name} is wider than the window"
                page.screenshot(path=out / f"{name}.png", full_page=size is PHONE)
                print(f"{name}.png", flush=True)
    with Image.open(out / "3-desktop.png") as image:  # fewer colors: a quarter of the size
        image.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(out / "readme.png", optimize=True)


def unlock(browser: Browser, url: str, out: Path) -> None:
    """A server with a key: the page asks for it, refuses a wrong one, and sends the right one."""
    with opened(browser, url, PHONE) as page:
        field = page.get_by_label("This server needs its API key")
        field.fill("not-the-right-key")
        field.press("Enter")
        expect(page.locator("#key-error")).to_have_text("The server did not take this key.")
        page.screenshot(path=out / "7-key.png")
        field.fill(KEY)
        field.press("Enter")
        expect(page.locator("#status")).to_have_text("live")
        send(page, "Once upon a time", 1, 8)
        expect(page.locator("#timing")).to_contain_text("8 tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python", help="of the environment that has minillm")
    parser.add_argument("--browser", default="/usr/bin/chromium")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "engine_room")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=TIMEOUT)
    size = ("--num-blocks", "640", "--max-num-seqs", "16")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=FLAGS)
        with serving(options.python, *size) as url:
            use(browser, url, options.out)
        with serving(options.python, *size) as url:
            crowded(browser, url, options.out)
        with serving(options.python, *size, "--api-key", KEY) as url:
            unlock(browser, url, options.out)
        browser.close()
    print("tokens, rows and blocks appeared as they should")


if __name__ == "__main__":
    main()
