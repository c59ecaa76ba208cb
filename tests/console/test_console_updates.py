"""What an update of a page leaves as it is, in Chromium: the keyboard focus, and other rows."""

from __future__ import annotations

from typing import cast

from playwright.async_api import Browser, expect

from forge.cli.status.system_state import Service
from forge.v1 import common_pb2 as pb
from forge.v1 import scheduler_pb2
from services.console.config import ConsoleConfig, HttpSettings
from services.console.data.trajectories.closes import Closes
from tests.support.console.browser import LIMIT_MS, watched
from tests.support.console.page import served
from tests.support.pool.records import make_turn


def group(tag: str, phase: str) -> scheduler_pb2.BatchGroup:
    """The only group of a data set."""
    task = pb.Task(task_id=tag, domain="code", tag=tag, purpose=pb.PURPOSE_TRAIN)
    return scheduler_pb2.BatchGroup(group=pb.GroupRecord(task=task), phase=phase)


def runner(**metadata: str) -> Service:
    """A runner that is ready."""
    known = {"kind": "runner", "instance": "runner-1", "address": "127.0.0.1:1", "role": ""}
    return Service(**known, state="ready", version="1", metadata=metadata)


async def test_update_of_a_table_leaves_the_focus(browser: Browser) -> None:
    """A focused link keeps the keyboard focus when a new data set comes above it."""
    async with served() as console, watched(browser, console.address) as one:
        page = one.page
        console.operator.listed.append(group("math", "trained"))
        await one.go("#/tasks")
        await page.locator("a", has_text="math").focus()
        console.operator.listed.append(group("new", "queued"))
        await page.wait_for_selector("section[aria-label='Data sets'] a:has-text('new')")
        assert await page.evaluate("document.activeElement.textContent") == "math"


async def test_closed_trajectory_leaves_the_other_rows(browser: Browser) -> None:
    """Its row comes first, or moves there; links of the others can be pressed meanwhile."""
    async with served() as console, watched(browser, console.address) as one:
        for number in range(3):
            console.pool.put(f"{number}:0:0", make_turn())
        await one.go("#/trajectories")
        await one.until("document.querySelectorAll('tbody tr').length === 3")
        await expect(one.page.locator("#link")).to_have_text("live", timeout=LIMIT_MS)
        await one.page.evaluate("for (const row of document.querySelectorAll('tr')) row.kept = 1")
        console.pool.put("3:0:0", make_turn())
        closes = cast(Closes, console.topics["closes"])
        for number in (3, 1):
            closes.add(console.pool.summary(console.pool.stored[f"{number}:0:0"]))
        rows = "[...document.querySelectorAll('tbody tr')]"
        await one.until(f"{rows}.map((row) => row.textContent[0]).join('') === '1320'")
        assert await one.page.evaluate(f"{rows}.map((row) => row.kept || 0)") == [0, 0, 1, 1]


async def test_dialog_returns_the_focus_to_an_updated_button(browser: Browser) -> None:
    """The button that opened it has been replaced by an update meanwhile."""
    config = ConsoleConfig(http=HttpSettings(steering=True))
    async with served(config) as console, watched(browser, console.address) as one:
        page = one.page
        console.services = [runner()]
        await one.go("#/services")
        await page.locator("button", has_text="Drain runner-1").press("Enter")
        await page.wait_for_selector("dialog[open]")
        console.services = [runner(host="new")]
        await page.wait_for_selector("article:has-text('new')", state="attached")
        await page.keyboard.press("Escape")
        await expect(page.locator("dialog")).to_have_count(0, timeout=LIMIT_MS)
        assert await page.evaluate("document.activeElement.textContent") == "Drain runner-1"
