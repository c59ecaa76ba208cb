"""The pages of the console in Chromium, over a real `forge run`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.async_api import Browser, expect
from safetensors import safe_open

from tests.support.console.browser import LIMIT_MS, watched
from tests.support.suite.forge_run import ForgeRun, end_runs

PAGES = ("overview", "window", "trajectories", "tasks", "weights", "services")
READY = {
    "overview": "dl.tiles dd:has-text('/ 500')",
    "window": "ul.legend li:has-text('trained')",
    "trajectories": "table.rows tbody tr",
    "tasks": "section[aria-label='Data sets'] tbody tr:has-text('trained')",
    "weights": "table.rows tbody tr:has-text('newest')",
    "services": "article.service:has-text('scheduler')",
}
"""By page: an element that only data of the services makes."""


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> None:
    """Instead of the fixture of every suite: one run serves all tests here."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, forge_root: Path) -> Iterator[ForgeRun]:
    """A run in its training, with one evaluation behind it."""
    folder = tmp_path_factory.mktemp("console")
    extra = ("--eval-every-steps", "2")
    started = ForgeRun(folder / "run", root=forge_root, steps=500, extra=extra)
    started.start()
    started.wait_for_step(3)
    yield started
    end_runs()


@pytest.fixture(scope="module")
def address(run: ForgeRun) -> str:
    """The address that the run prints."""
    found = re.search(r"Console (http://127\.0\.0\.1:\d+/)", run.output())
    assert found, run.explain()
    return found[1]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
async def test_page_renders_cleanly(name: str, dark: bool, browser: Browser, address: str) -> None:
    """With data, without an error, a request elsewhere, or a finding of axe-core."""
    async with watched(browser, address, dark=dark) as one:
        await one.go(f"#/{name}")
        await one.page.wait_for_selector(READY[name])
        await expect(one.page.locator("#link")).to_have_text("live", timeout=LIMIT_MS)
        assert await one.problems() == []
        assert one.errors == []


@pytest.mark.parametrize("name", PAGES)
async def test_page_fits_a_phone(name: str, browser: Browser, address: str) -> None:
    """Wide tables scroll in their own frame."""
    async with watched(browser, address, width=360, height=740) as one:
        await one.go(f"#/{name}")
        await one.page.wait_for_selector(READY[name])
        assert await one.overflow_px() <= 0
        assert await one.problems() == []


async def test_overview_follows_the_run(browser: Browser, address: str, run: ForgeRun) -> None:
    """A later step arrives without a reload, and its curves are drawn."""
    async with watched(browser, address) as one:
        await one.go("#/overview")
        step = one.page.locator(".tile dd").first
        await expect(step).to_have_text(re.compile(r"^\d+ / 500$"), timeout=LIMIT_MS)
        seen = int((await step.inner_text()).split()[0])
        await one.until(
            "seen => parseInt(document.querySelector('.tile dd').textContent) > seen", seen
        )
        await one.until("document.querySelectorAll('.plot canvas').length >= 12")
        held = one.page.locator(".tile", has_text="Held-out").locator("dd").first
        await expect(held).to_have_text(re.compile(r"\d"), timeout=LIMIT_MS)
        assert one.errors == []


async def test_window_moves_and_a_key_opens_a_cell(browser: Browser, address: str) -> None:
    """The head advances; arrow keys choose a position, Enter shows its group."""
    async with watched(browser, address) as one:
        await one.go("#/window")
        await one.page.wait_for_selector(READY["window"])
        head = "parseInt(document.querySelector('.sub').textContent.match(/H (\\d+)/)[1])"
        before = await one.page.evaluate(head)
        await one.until(f"before => {head} > before", before)
        canvas = one.page.locator("canvas")
        await canvas.focus()
        await one.page.keyboard.press("Home")
        await one.page.keyboard.press("ArrowRight")
        await one.page.keyboard.press("Enter")
        card = one.page.locator("aside")
        await expect(card).to_contain_text("sealed", timeout=LIMIT_MS)
        chosen = await card.locator("h2").inner_text()
        assert one.page.url.endswith(f"#/window/{chosen.split()[1]}")
        await canvas.click(position={"x": 120, "y": 12})
        await expect(card.locator("h2")).not_to_have_text(chosen, timeout=LIMIT_MS)
        assert one.errors == []


async def test_list_leads_to_a_trajectory_and_its_tokens(browser: Browser, address: str) -> None:
    """Filter, tree with a fold, turns with calls, tokens with their log-probs, link to a turn."""
    async with watched(browser, address) as one:
        page = one.page
        await one.go("#/trajectories")
        await page.fill("input[name=domain]", "general")
        await page.fill("input[name=min_reward]", "0")
        await page.click("button:has-text('Filter')")
        await one.until(
            "[...document.querySelectorAll('tbody td:nth-child(2)')].length > 0 && "
            "[...document.querySelectorAll('tbody td:nth-child(2)')]"
            ".every(cell => cell.textContent === 'general')"
        )
        # Not one of an evaluation, whose groups have a single rollout.
        await page.locator("tbody a", has_text="train-").first.click()
        await page.wait_for_selector("button.step")
        await page.locator("button.step").first.click()
        await page.wait_for_selector(".message.answer")
        assert re.search(r"#/trajectories/[^/]+/0$", page.url)
        await page.wait_for_selector(".t.own")
        await page.locator(".t.own").first.hover()
        await expect(page.locator(".token-info")).to_contain_text("log-prob", timeout=LIMIT_MS)
        for mode in ("ratio", "entropy", "advantage", "version", "none"):
            await page.select_option("section select", mode)
        assert await one.problems() == []
        assert await one.overflow_px() <= 0
        await page.locator("p a", has_text="train-").click()
        await page.wait_for_selector("section.rollout .brief")
        assert await page.locator("section.rollout").count() >= 2
        assert await one.problems() == []
        assert one.errors == []


async def test_trained_turn_has_the_values_of_its_step(
    browser: Browser, address: str, run: ForgeRun
) -> None:
    """From the trainer's store over its RPC: each sampled token of the turn has ratio and
    entropy."""
    stored = (run.directory / "checkpoints" / "token-values").glob("step-*.safetensors")
    with safe_open(max(stored), framework="pt") as file:
        trajectory, turn, tokens = json.loads(file.metadata()["about"])["turns"][0]
    async with watched(browser, address) as one:
        page = one.page
        await one.go(f"#/trajectories/{quote(trajectory)}/{turn}")
        await page.wait_for_selector(".t.own")
        for mode in ("ratio", "entropy"):
            await page.select_option("section select", mode)
            await expect(page.locator(".scale")).to_contain_text("are stored.", timeout=LIMIT_MS)
            await expect(page.locator(".scale")).not_to_contain_text("Not stored for this turn")
            assert await one.problems() == []
        await page.locator(".t.own").first.hover()
        info = page.locator(".token-info")
        await expect(info).to_contain_text(re.compile(r"ratio [\d.]+.* entropy [\d.]+ nats"))
        path = f"api/trajectories/{quote(trajectory)}/turns/{turn}/values"
        values = await page.evaluate("path => fetch(path).then(a => a.json())", path)
        own = [one for one in values["entropies"] if one is not None]
        assert len(own) >= tokens and max(own) > 0
        assert one.errors == []


async def test_search_leads_to_the_turn_with_the_text(browser: Browser, address: str) -> None:
    """A word of a message, with a filter; the match shows it, and its link opens the turn."""
    async with watched(browser, address) as one:
        page = one.page
        await one.go("#/trajectories")
        await page.wait_for_selector(READY["trajectories"])
        await page.fill("input[name=text]", "ANSWER")
        await page.fill("input[name=domain]", "general")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("tbody .excerpt mark")
        marks = await page.locator("tbody .excerpt mark").all_inner_texts()
        assert {mark.lower() for mark in marks} == {"answer"}
        assert await one.problems() == []
        await page.locator("tbody tr:has(mark) a").first.click()
        await page.wait_for_selector(".message")
        assert re.search(r"#/trajectories/[^/]+/[0-9]+$", page.url)
        await one.go("#/trajectories")
        await page.fill("input[name=text]", "no such words anywhere")
        await page.keyboard.press("Enter")
        await expect(page.locator(".empty")).to_be_visible(timeout=LIMIT_MS)
        await page.locator("summary", has_text="More conditions").click()
        await page.fill("input[name=text]", "")
        await page.fill("input[name=tag]", "train")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("tbody tr")
        assert await one.problems() == []
        assert one.errors == []


async def test_data_set_leads_to_its_tasks(browser: Browser, address: str) -> None:
    """From the data set to a task with the outcomes of its rollouts, and to its group."""
    async with watched(browser, address, width=390, height=844) as one:
        page = one.page
        await one.go("#/tasks")
        await page.wait_for_selector(READY["tasks"])
        await page.wait_for_selector("section[aria-label='Held-out tasks'] tbody tr")
        await page.locator("section[aria-label='Data sets'] tbody a").first.click()
        await page.wait_for_selector("section[aria-label='Tasks'] tbody tr")
        assert await one.problems() == []
        assert await one.overflow_px() <= 0
        trained = page.locator("section[aria-label='Tasks'] tbody tr", has_text="trained")
        await trained.locator("a").first.click()
        await page.wait_for_selector("section.rollout")
        assert one.errors == []


async def test_killed_service_is_shown_and_the_page_recovers(
    browser: Browser, address: str, run: ForgeRun
) -> None:
    """Also the console itself: the browser connects again."""
    async with watched(browser, address) as one:
        await one.go("#/services")
        await one.page.wait_for_selector(READY["services"])
        run.kill("console")
        await expect(one.page.locator("#link")).to_have_text("no connection", timeout=LIMIT_MS)
        await expect(one.page.locator("#link")).to_have_text("live", timeout=LIMIT_MS)


def test_run_goes_on_after_its_console_has_crashed(run: ForgeRun) -> None:
    """Training does not need it."""
    step = run.last_step()
    run.wait_for_step(step + 2)
