"""Writes the pictures of docs/console.md: `make console-screenshots`.

Starts a real `forge run`, waits until there are curves, and takes each page once.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from urllib.parse import quote

from PIL import Image
from safetensors import safe_open

from tests.support.console.browser import Watched, chromium, watched
from tests.support.suite.forge_run import ForgeRun, end_runs

IMAGES = Path(__file__).parents[3] / "docs" / "images"
STEPS = 24
"""Steps before the first picture."""
MOST_BYTES = 150_000


async def main() -> None:
    """Take every picture."""
    with tempfile.TemporaryDirectory(prefix="forge-console-") as folder:
        run = ForgeRun(
            Path(folder) / "tiny",
            # A root named on the command line has the starting weights already.
            root=Path(sys.argv[1]) if sys.argv[1:] else Path(folder) / "root",
            steps=120,
            extra=("--eval-every-steps", "8", "--eval-tasks", "8"),
        )
        run.start()
        try:
            await asyncio.to_thread(run.wait_for_step, STEPS)
            found = re.search(r"Console (\S+)", run.output())
            assert found, run.explain()
            await take_all(found[1], run.directory)
        finally:
            end_runs()


def trained_turn(run: Path) -> str:
    """The path of a late turn of the newest step, whose tokens the pool still has."""
    newest = max((run / "checkpoints" / "token-values").glob("step-*.safetensors"))
    with safe_open(newest, framework="pt") as file:
        turns = json.loads(file.metadata()["about"])["turns"]
    trajectory, turn, _ = max(turns, key=lambda one: one[1])
    return f"{quote(trajectory)}/{turn}"


async def take_all(address: str, run: Path) -> None:
    """One picture for each page; the phone has the overview."""
    async with chromium() as browser:
        async with watched(browser, address, height=1180) as one:
            await one.go("#/overview")
            await one.page.wait_for_selector("dl.tiles dd:has-text('/')")
            await one.until("document.querySelectorAll('.plot canvas').length >= 12")
            await take(one, "console_overview")
        async with watched(browser, address, dark=True, height=760) as one:
            await one.go("#/window")
            await one.page.wait_for_selector("ul.legend li:has-text('trained')")
            await one.page.locator("canvas").click(position={"x": 120, "y": 40})
            await one.page.wait_for_selector("aside .dots")
            await take(one, "console_window")
        async with watched(browser, address, height=900) as one:
            await one.go(f"#/trajectories/{trained_turn(run)}")
            await one.page.wait_for_selector(".t.own")
            await one.page.select_option("section select", "entropy")
            await one.page.wait_for_selector(".scale:has-text('are stored.')")
            await one.page.locator(".t.own").first.hover()
            await take(one, "console_trajectory")
        async with watched(browser, address, height=640) as one:
            await one.go("#/trajectories")
            await one.page.wait_for_selector("tbody tr")
            await one.page.fill("input[name=text]", "answer")
            await one.page.fill("input[name=domain]", "general")
            await one.page.keyboard.press("Enter")
            await one.page.wait_for_selector("tbody .excerpt mark")
            await take(one, "console_search")
        async with watched(browser, address, dark=True, height=760) as one:
            await one.go("#/tasks")
            await one.page.wait_for_selector("section[aria-label='Held-out tasks'] tbody tr")
            await take(one, "console_tasks")
        async with watched(browser, address, height=620) as one:
            await one.go("#/weights")
            await one.page.wait_for_selector("table.rows tbody tr")
            await take(one, "console_weights")
        async with watched(browser, address, dark=True, height=760) as one:
            await one.go("#/services")
            await one.page.wait_for_selector("article.service")
            await take(one, "console_services")
        async with watched(browser, address, width=390, height=844) as one:
            await one.go("#/overview")
            await one.page.wait_for_selector("dl.tiles dd:has-text('/')")
            await one.until("document.querySelectorAll('.plot canvas').length >= 12")
            await take(one, "console_phone")


async def take(one: Watched, name: str) -> None:
    """Write a picture once the page has been still for a moment. Raises AssertionError if it has
    errors or is too large."""
    await one.page.wait_for_timeout(1500)
    path = IMAGES / f"{name}.png"
    taken = Image.open(BytesIO(await one.page.screenshot())).convert("RGB")
    # A palette of 256 colors: a third of the size, and the same to the eye.
    taken.quantize(256).save(path, optimize=True)
    assert not one.errors, one.errors
    assert path.stat().st_size < MOST_BYTES, f"{path}: {path.stat().st_size} bytes"
    print(f"{path.relative_to(IMAGES.parents[1])}: {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    asyncio.run(main())
