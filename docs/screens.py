"""Screenshots of `gemmtuned report` and `gemmtuned top`, in docs/images: `python docs/screens.py HOME`.

HOME is one that a demo has run in (`gemmtuned demo --home HOME`).  The report is opened in a real Chromium (Playwright
drives it: pip install playwright; CHROMIUM names the program, Debian's is /usr/bin/chromium, else it is Playwright's
own) light, dark, 400 pixels wide and as it prints; `top` is drawn by Textual from what a real daemon of that home says.
Nothing is retouched.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import TryLater
from gemmtuned.daemon.watch.ask import ask
from gemmtuned.top import actions, picture

IMAGES: Final = Path(__file__).resolve().parent / "images"
VIEWS: Final[dict[str, dict[str, Any]]] = {
    "report-light": {"viewport": {"width": 1000, "height": 1300}},
    "report-dark": {"viewport": {"width": 1000, "height": 1300}, "color_scheme": "dark"},
    "report-narrow": {"viewport": {"width": 400, "height": 1300}},
}
A4_WIDE: Final = 720  # pixels, within Chromium's margins
TOP_SIZE: Final = (132, 30)
WAIT_S: Final = 40.0


def report(page: Path, folder: Path) -> None:
    """Pictures of a report: the first screen of each form, and a check that no form is wider than its screen."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=os.environ.get("CHROMIUM") or None, args=["--no-sandbox"])
        for name, how in VIEWS.items():
            tab = browser.new_context(**how).new_page()
            tab.goto(page.as_uri())
            wide = tab.evaluate("document.documentElement.scrollWidth")
            if wide > how["viewport"]["width"]:
                raise SystemExit(f"{name}: {wide} pixels wide in a window of {how['viewport']['width']}")
            tab.screenshot(path=str(folder / f"{name}.png"))
        tab = browser.new_context(viewport={"width": A4_WIDE, "height": 1300}).new_page()
        tab.emulate_media(media="print")
        tab.goto(page.as_uri())
        wide = tab.evaluate("document.documentElement.scrollWidth")
        if wide > A4_WIDE:
            raise SystemExit(f"on paper: {wide} pixels wide on a sheet of {A4_WIDE}")
        with tempfile.TemporaryDirectory() as scratch:
            printed = Path(scratch) / "report.pdf"
            tab.pdf(path=str(printed), format="A4")
            print(f"printed: {printed.stat().st_size} bytes of PDF")
        print(f"browser: Chromium {browser.version}")
        browser.close()


def top(home: Path, folder: Path) -> None:
    """The screen of `gemmtuned top` beside a daemon of this home that is started for it."""
    from gemmtuned.top.app import Top

    daemon = subprocess.Popen(
        [sys.executable, "-m", "gemmtuned", "daemon"],
        env={**os.environ, "GEMMTUNED_HOME": str(home)},
        stderr=subprocess.DEVNULL,
    )
    try:
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            try:
                if ask(home)["covered"]:
                    break
            except TryLater:
                pass
            time.sleep(0.5)

        async def draw() -> str:
            app = Top(lambda: picture.of(ask(home)), actions.run)
            async with app.run_test(size=TOP_SIZE) as pilot:
                await pilot.pause(2.0)
                return app.export_screenshot()

        (folder / "top.svg").write_text(asyncio.run(draw()))
    finally:
        daemon.terminate()
        daemon.wait(20)


def main() -> None:
    """Draw all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path)
    parser.add_argument("--page", type=Path, help="a report that is there already, in place of one of HOME")
    parser.add_argument("--out", type=Path, default=IMAGES)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        page = given.page or Path(scratch) / "report.html"
        if given.page is None:
            command = [sys.executable, "-m", "gemmtuned", "report", "--out", str(page)]
            subprocess.run(command, env={**os.environ, "GEMMTUNED_HOME": str(given.home)}, check=True)
        report(page.resolve(), given.out)
    top(given.home, given.out)


if __name__ == "__main__":
    main()
