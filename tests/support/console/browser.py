"""Debian's Chromium without a screen, and a page that records what must not happen."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from playwright.async_api import Browser, Page, async_playwright

from tests.support.runtime.waiting import StillNotSo, until

LIMIT_MS = 60_000
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def program() -> str:
    """Path of the browser. Raises AssertionError with the remedy."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    assert found, "no Chromium: apt-get install chromium"
    return found


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser for the length of a block."""
    async with async_playwright() as playwright:
        # Root has no namespaces of its own in a container; the pages are ours.
        arguments = ["--no-sandbox"]
        browser = await playwright.chromium.launch(executable_path=program(), args=arguments)
        try:
            yield browser
        finally:
            await browser.close()


@dataclass(slots=True)
class Watched:
    """A page at one address, with its errors."""

    page: Page
    address: str
    errors: list[str] = field(default_factory=list)
    """Console errors and warnings, exceptions, requests to other hosts, failed requests."""

    async def go(self, path: str) -> None:
        """Open a page of the console, by its hash."""
        await self.page.goto(f"{self.address}{path}")

    async def until(self, expression: str, argument: Any = None) -> None:
        """Wait until an expression is true. Not by `wait_for_function`: the policy of the page has
        no `eval`."""
        try:
            await until(lambda: self.page.evaluate(expression, argument), limit_s=LIMIT_MS / 1000)
        except StillNotSo:
            raise StillNotSo(f"not true within {LIMIT_MS} ms: {expression}") from None

    async def problems(self) -> list[str]:
        """Violations that axe-core finds, as lines."""
        script = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
        # By the protocol: the policy of the page has no room for another script.
        await self.page.evaluate(script)
        # Rules that hold list every element of the page: minutes of decoding for a long table.
        found: list[dict[str, Any]] = await self.page.evaluate(
            "axe.run({resultTypes: ['violations']}).then((found) => found.violations)"
        )
        return [
            f"{one['id']}: {one['help']}: {node['target']} {node.get('failureSummary', '')}"
            for one in found
            for node in one["nodes"]
        ]

    async def overflow_px(self) -> int:
        """Width by which the page is wider than the window."""
        wider: int = await self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        return wider


@asynccontextmanager
async def watched(
    browser: Browser,
    address: str,
    *,
    dark: bool = False,
    width: int = 1280,
    height: int = 900,
) -> AsyncIterator[Watched]:
    """A page that records its errors; `address` ends with a slash."""
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    page = await context.new_page()
    page.set_default_timeout(LIMIT_MS)
    found = Watched(page, address)
    page.on(
        "console",
        lambda said: (
            found.errors.append(f"{said.type}: {said.text}")
            if said.type in ("error", "warning")
            else None
        ),
    )
    page.on("pageerror", lambda error: found.errors.append(f"exception: {error}"))
    page.on(
        "request",
        lambda asked: (
            None if asked.url.startswith(address) else found.errors.append(f"asked {asked.url}")
        ),
    )
    try:
        yield found
    finally:
        await context.close()
