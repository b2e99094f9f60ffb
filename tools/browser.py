"""Run lesson 00 in headless JupyterLab as a learner would, with an exercise left empty, then wrong, then right.

    pip install playwright    (in any environment; Chromium from the system)
    python tools/browser.py --lab .venv/bin/jupyter --browser /usr/bin/chromium --out build/browser

Not part of the test suite, because it needs a browser. It saves screenshots, and fails when a step's output is wrong.
"""

import argparse
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
LESSON = "00_start_here"
EXERCISE = "def free_batch("
WRONG = "    return 16\n"
RIGHT = "    return int(bytes_per_number * operations_per_s // (2 * bytes_per_s))\n"
SIGNATURE = "def free_batch(numbers, bytes_per_number, bytes_per_s, operations_per_s):\n"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
TIMEOUT = 240_000  # milliseconds for a whole lesson


@contextmanager
def lab(jupyter: str):
    """Run JupyterLab on a copy of the lesson, and yield its address."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        shutil.copy(ROOT / "notebooks" / f"{LESSON}.ipynb", folder)
        settings = Path(folder, "settings", "@jupyterlab", "notebook-extension", "tracker.jupyterlab-settings")
        settings.parent.mkdir(parents=True)
        settings.write_text('{"windowingMode": "none"}')  # render every cell, visible or not
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        options = [
            "--no-browser",
            f"--port={port}",
            "--allow-root",
            "--IdentityProvider.token=",
            "--notebook-dir",
            folder,
        ]
        environment = os.environ | {
            "MINILLM_TIER": "cpu",
            "JUPYTER_CONFIG_DIR": folder,
            "JUPYTERLAB_SETTINGS_DIR": f"{folder}/settings",
        }
        server = subprocess.Popen([jupyter, "lab", *options], env=environment, stderr=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(120):
                try:
                    urllib.request.urlopen(f"{url}/api")
                    break
                except OSError:
                    time.sleep(0.5)
            yield url
        finally:
            server.terminate()
            server.wait()


def run_all(page: Page) -> None:
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    # Cells are numbered as they finish, so all have run when each has a number.
    page.wait_for_function(
        """() => {
            const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(e => e.innerText);
            return prompts.length > 20 && prompts.every(p => /^\\[\\d+\\]:?$/.test(p.trim()));
        }""",
        timeout=TIMEOUT,
    )


def cell(page: Page, text: str):
    return page.locator(".jp-CodeCell").filter(has_text=text).first


def rewrite(page: Page, body: str) -> str:
    """Type a solution into the exercise's cell, then run it and the check below it. Returns the check's output."""
    exercise = cell(page, EXERCISE)
    exercise.scroll_into_view_if_needed()
    exercise.locator(".cm-content").click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(SIGNATURE + body)
    page.keyboard.press("Shift+Enter")
    page.wait_for_timeout(500)
    check = cell(page, "check(free_batch)")
    check.locator(".cm-content").click()
    before = check.locator(".jp-InputPrompt").inner_text()
    page.keyboard.press("Shift+Enter")
    expect(check.locator(".jp-InputPrompt")).not_to_have_text(before, timeout=TIMEOUT)
    expect(check.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]"), timeout=TIMEOUT)
    return check.locator(".jp-OutputArea").inner_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lab", default="jupyter", help="the environment's jupyter")
    parser.add_argument("--browser", default="/usr/bin/chromium")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "browser")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with lab(options.lab) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 1000})

        def picture(name: str, at: str | None = None) -> None:
            if at:
                cell(page, at).scroll_into_view_if_needed()
                page.wait_for_timeout(500)
            page.screenshot(path=options.out / f"{name}.png")
            print(f"{name}.png", flush=True)

        page.goto(f"{url}/lab/tree/{LESSON}.ipynb")
        page.wait_for_selector(".jp-CodeCell", timeout=TIMEOUT)
        page.wait_for_timeout(3000)
        picture("1-opened")
        run_all(page)
        assert not page.locator(".jp-OutputArea [data-mime-type*=error]").count(), "a cell shows an error"
        picture("2-run", "draw.roofs(")
        said = cell(page, "check(free_batch)").locator(".jp-OutputArea").inner_text()
        assert "not solved yet" in said, said
        picture("3-empty", "check(free_batch)")
        said = rewrite(page, WRONG)
        assert "✗ only whole tokens" in said and "2 of 5 hold" in said, said
        picture("4-wrong", "check(free_batch)")
        said = rewrite(page, RIGHT)
        assert "Solved: all 5 hold." in said, said
        picture("5-right", "check(free_batch)")
        browser.close()
    print("empty, wrong and right solutions all gave the expected output")


if __name__ == "__main__":
    main()
