"""What the pages do with hostile texts and with very long trajectories, in Chromium."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.async_api import Browser, expect

from forge.cli.status.system_state import Service
from forge.client.stored.token_values import CLIPPED, MASKED, TurnValues
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.v1 import common_pb2 as pb
from forge.v1 import scheduler_pb2, trainer_pb2
from services.console.config import ConsoleConfig, HttpSettings
from services.console.data.trajectories import trajectory_list
from tests.support.console.browser import LIMIT_MS, watched
from tests.support.console.page import Console, served, token_of, write_metrics
from tests.support.pool.records import make_reward, make_turn

HOSTILE = (
    "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    "</pre><a href=\"javascript:document.title='taken'\">x</a>"
)
LONG = 200_000


async def test_texts_of_a_model_stay_texts(browser: Browser) -> None:
    """Tags, handlers and links that a model writes are shown as they are written."""
    async with served() as console, watched(browser, console.address) as one:
        message = {"role": "user", "content": HOSTILE, "name": HOSTILE}
        call = {"function": {"name": HOSTILE, "arguments": HOSTILE}}
        answer = {"role": "assistant", "content": HOSTILE, "tool_calls": [call]}
        turn = make_turn(messages_json=json.dumps({"messages": [message], "answer": answer}))
        turn.parse_error, turn.agent, turn.context_action = HOSTILE, HOSTILE, HOSTILE
        console.pool.put("t:0:0", turn)
        console.pool.stored["t:0:0"].rewards[0].name = HOSTILE
        for path in ("#/trajectories/t:0:0/0", "#/trajectories/group/t"):
            await one.go(path)
            await expect(one.page.locator("main")).to_contain_text("onerror", timeout=LIMIT_MS)
            assert await one.page.evaluate("document.title") != "taken"
            assert await one.page.locator("main img, main script, a[href^=javascript]").count() == 0
        assert one.errors == []


async def test_html_from_a_text_is_refused_by_the_browser(browser: Browser) -> None:
    """A script of the page that tried it would fail: the policy demands trusted types."""
    async with served() as console, watched(browser, console.address) as one:
        await one.go("")
        refused = await one.page.evaluate(
            "() => { try { document.body.innerHTML = '<b>x</b>'; return ''; }"
            " catch (error) { return error.name; } }"
        )
        assert refused == "TypeError"


async def test_long_trajectory_scrolls(browser: Browser) -> None:
    """200,000 tokens: all are reached, and few of them are elements at any time."""
    turn = make_turn(prompt=range(1000), sampled=(1,))
    turn.sampled.ids = int32_bytes(range(LONG))
    turn.sampled.logprobs = float32_bytes([-0.5] * LONG)
    turn.sampled.weight_versions = int32_bytes([3] * LONG)
    async with served() as console, watched(browser, console.address) as one:
        console.pool.put("t:0:0", turn)
        console.values.stored["t:0:0"] = {0: values_of(*[0.5] * LONG, clipped=LONG - 1)}
        page = one.page
        await one.go("#/trajectories/t:0:0/0")
        await one.until(
            "document.querySelector('.tokens') && "
            "document.querySelector('main').textContent.includes('201.0 k tokens')"
            " && !document.querySelector('main').textContent.includes(' read')"
        )
        await page.evaluate("document.querySelector('.tokens').scrollTop = 1e9")
        await page.wait_for_selector(f".t[data-at='{LONG + 999}']")
        assert await page.locator(".t").count() < 5000
        await page.evaluate("document.querySelector('.tokens').scrollTop = 0")
        await page.wait_for_selector(".t[data-at='0']")
        assert await page.locator(".t").count() < 5000
        await page.select_option("section select", "ratio")
        await page.click("button:has-text('Next clipped')")
        await page.wait_for_selector(f".t.at.clipped[data-at='{LONG + 999}']")
        await expect(page.locator(".scale")).to_contain_text("200.0 k of 200.0 k")
        # A hundred jumps: each one draws its lines.
        slowest_ms = await page.evaluate(
            """async () => {
                const box = document.querySelector('.tokens');
                let slowest = 0;
                for (let jump = 0; jump < 100; jump += 1) {
                    const began = performance.now();
                    box.scrollTop = (box.scrollHeight * jump) / 100;
                    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
                    slowest = Math.max(slowest, performance.now() - began);
                    if (!document.querySelector('.t')) throw new Error('nothing is drawn');
                }
                return slowest;
            }"""
        )
        print(f"slowest of 100 jumps: {slowest_ms:.0f} ms")
        assert one.errors == []


def values_of(*log_ratios: float, clipped: int) -> TurnValues:
    """Values of a turn of step 4; token `clipped` alone is clipped, and the last one masked."""
    count = len(log_ratios)
    flags = bytearray(count)
    flags[clipped] |= CLIPPED
    flags[-1] |= MASKED
    return TurnValues(
        step=4,
        weight_version=9,
        logprobs=array("f", [-1.5] * count),
        log_ratios=array("f", log_ratios),
        entropies=array("f", [5.0, *[0.25] * (count - 1)]),
        advantages=array("f", [-2.0] * count),
        flags=flags,
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_tokens_have_the_trainers_values(browser: Browser, dark: bool) -> None:
    """Colors, legend and marks of each mode without a finding of axe-core; by the keyboard alone,
    token by token; a turn without values says so and has no color."""
    async with served() as console, watched(browser, console.address, dark=dark) as one:
        page = one.page
        console.pool.put(
            "t:0:0",
            make_turn(index=0, prompt=(1, 2), sampled=(3, 4)),
            make_turn(index=1, prefix=4, prompt=(5,), sampled=(6, 7, 8)),
        )
        console.values.stored["t:0:0"] = {1: values_of(2.0, -2.0, 0.0, clipped=0)}
        await one.go("#/trajectories/t:0:0/1")
        await page.wait_for_selector(".t.own.clipped")
        legend, info = page.locator(".scale"), page.locator(".token-info")
        colored = "[...document.querySelectorAll('.t')].map(t => t.style.backgroundColor !== '')"
        for mode, words in (
            ("ratio", "Values of 3 of 5 sampled tokens are stored."),
            ("entropy", "entropy 0 to 3 nats"),
            ("advantage", "The trainer's, where it is stored"),
            ("version", "of one weight version"),
            ("logprob", "the less likely"),
        ):
            await page.select_option("section select", mode)
            await expect(legend).to_contain_text(words, timeout=LIMIT_MS)
            assert await one.problems() == []
            if mode in ("ratio", "entropy"):
                assert await page.evaluate(colored) == [*[False] * 5, True, True, True]
        await page.locator(".tokens").focus()
        for _ in range(6):
            await page.keyboard.press("ArrowRight")
        await expect(info).to_contain_text("step 4 with weights v9", timeout=LIMIT_MS)
        await expect(info).to_contain_text("ratio 7.389 (clipped), entropy 5 nats")
        await expect(info).to_have_attribute("aria-live", "polite")
        await expect(page.locator(".t.at")).to_have_attribute("data-at", "5")
        await page.keyboard.press("ArrowLeft")
        await page.keyboard.press("ArrowLeft")
        await expect(info).to_contain_text("turn 0", timeout=LIMIT_MS)
        await expect(info).to_contain_text("ratio and entropy not stored for this turn")
        await page.click("button:has-text('Next clipped')")
        await expect(page.locator(".t.at")).to_have_attribute("data-at", "5")
        await page.locator(".t.masked").hover()
        await expect(info).to_contain_text("ratio 1 (masked)", timeout=LIMIT_MS)
        await page.select_option("section select", "ratio")
        await page.locator("button.step").first.click()
        await expect(legend).to_contain_text(
            "The trainer stores no values of these turns.", timeout=LIMIT_MS
        )
        assert await page.evaluate(colored) == [False] * 4
        assert await page.locator("button:has-text('Next clipped')").is_hidden()
        assert await one.problems() == [] and one.errors == []


async def test_login_leads_to_the_page(browser: Browser) -> None:
    """A wrong token is named; a right one opens the page, and the log-out closes it."""
    config = ConsoleConfig(http=HttpSettings(login="always"))
    async with served(config) as console, watched(browser, console.address) as one:
        page = one.page
        await one.go("#/window")
        await page.wait_for_selector("form.login")
        assert await one.problems() == []
        await page.fill("#token", "v1.garbage.garbage")
        await page.keyboard.press("Enter")
        await expect(page.locator("[role=alert]")).to_contain_text("token", timeout=LIMIT_MS)
        await page.fill("#token", token_of("viewer"))
        await page.keyboard.press("Enter")
        await page.wait_for_selector("ul.legend")
        assert token_of("viewer") not in await page.evaluate("document.cookie")
        await page.click("#logout")
        await page.wait_for_selector("form.login")


async def test_every_control_is_reached_by_the_keyboard(browser: Browser) -> None:
    """From the skip link over the navigation to the cells, each with a visible focus."""
    async with served() as console, watched(browser, console.address) as one:
        page = one.page
        await one.go("#/window")
        await page.wait_for_selector("ul.legend li")
        reached = []
        for _ in range(12):
            await page.keyboard.press("Tab")
            reached.append(
                await page.evaluate(
                    "[document.activeElement.textContent.trim() || document.activeElement.tagName,"
                    " getComputedStyle(document.activeElement).outlineStyle]"
                )
            )
        names = [name for name, _ in reached]
        pages = ["Overview", "Window", "Trajectories", "Tasks", "Services"]
        assert names[0] == "Skip to the content"
        assert [name for name in names[: names.index("CANVAS")] if name in pages] == pages
        assert "CANVAS" in names
        assert all(outline != "none" for name, outline in reached[: names.index("CANVAS") + 1])


async def test_operator_steers_weights_in_a_dialog(browser: Browser) -> None:
    """Nothing changes before the dialog is confirmed; Escape leaves it; an error stays beside the
    button. Page and dialog have no finding of axe-core."""
    config = ConsoleConfig(http=HttpSettings(steering=True))
    async with served(config) as console, watched(browser, console.address) as one:
        page, changes = one.page, console.steering.changes
        await one.go("#/weights")
        await page.click("button:has-text('Serve v1')")
        dialog = page.locator("dialog[open]")
        await expect(dialog).to_contain_text("Serve v1?", timeout=LIMIT_MS)
        assert await one.problems() == []
        await page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0, timeout=LIMIT_MS)
        assert changes == []
        await page.click("button:has-text('Canary of v2')")
        await dialog.locator("input").fill("40")
        await dialog.locator("button.primary").click()
        await expect(dialog).to_have_count(0, timeout=LIMIT_MS)
        assert changes == [("canary", 2, 0.4, "without login")]
        console.steering.hold = trainer_pb2.WeightsHold(
            base_version=1, canary_version=2, canary_workers=["decode-1"], subject="ada"
        )
        await expect(page.locator(".note")).to_contain_text("1 worker serves v2", timeout=LIMIT_MS)
        assert await one.problems() == [] and await one.overflow_px() <= 0
        console.steering.refusal = "the trainer is away"
        await page.click("button:has-text('Promote')")
        await dialog.locator("button.primary").click()
        await expect(dialog).to_contain_text("the trainer is away", timeout=LIMIT_MS)
        console.steering.refusal = ""
        await dialog.locator("button.primary").click()
        await expect(dialog).to_have_count(0, timeout=LIMIT_MS)
        assert changes[1:] == [("promote", "without login")]


async def test_operator_drains_a_runner(browser: Browser) -> None:
    """In a dialog, over the scheduler; the button then resumes it."""

    def runner(**metadata: str) -> list[Service]:
        known = {"kind": "runner", "instance": "runner-1", "address": "127.0.0.1:1", "role": ""}
        return [Service(**known, state="ready", version="1", metadata=metadata)]

    config = ConsoleConfig(http=HttpSettings(steering=True))
    async with served(config) as console, watched(browser, console.address) as one:
        console.services = runner()
        await one.go("#/services")
        card = one.page.locator("article", has_text="runner-1")
        dialog = one.page.locator("dialog[open]")
        for action, draining in (("Drain", True), ("Resume", False)):
            await card.locator(f"button:has-text('{action}')").click(timeout=LIMIT_MS)
            await expect(dialog).to_contain_text(f"{action} runner-1?", timeout=LIMIT_MS)
            await dialog.locator("button.primary").click()
            await expect(dialog).to_have_count(0, timeout=LIMIT_MS)
            assert console.operator.drains[-1] == ("runner-1", draining, "without login")
            console.services = runner(**({"draining": "1"} if draining else {}))
        await expect(card).to_contain_text("ready", timeout=LIMIT_MS)
        assert await one.problems() == []


async def test_reader_without_rights_gets_no_buttons(browser: Browser) -> None:
    """The page shows the versions all the same."""
    async with served() as console, watched(browser, console.address) as one:
        await one.go("#/weights")
        await one.page.wait_for_selector("table.rows th:has-text('v1')")
        assert await one.page.locator("main button").count() == 0
        assert one.errors == []


async def test_overview_overlays_other_runs(browser: Browser, tmp_path: Path) -> None:
    """Three charts with a line for each run; one without a file says why."""
    config = ConsoleConfig(compare=(str(write_metrics(tmp_path / "other", 5)), str(tmp_path / "x")))
    async with served(config) as console, watched(browser, console.address) as one:
        await console.operator.steps.put(trainer_pb2.StepMetrics(step=1, mean_reward=0.5))
        await one.go("#/overview")
        section = one.page.locator("section[aria-label='Runs compared']")
        await expect(section.locator("canvas")).to_have_count(3, timeout=LIMIT_MS)
        await expect(section).to_contain_text("other")
        await expect(section.locator(".note")).to_contain_text("does not exist")
        assert await one.problems() == [] and one.errors == []


def data_set_of(console: Console) -> None:
    """A data set with a trained group, and a held-out one."""
    for task_id, tag, phase in (("math.e0.r0", "math", "trained"), ("e", "eval-s1", "evaluated")):
        purpose = pb.PURPOSE_EVAL if tag.startswith("eval") else pb.PURPOSE_TRAIN
        task = pb.Task(
            task_id=task_id,
            domain="code",
            tag=tag,
            purpose=purpose,
            scaffold=HOSTILE,
            metadata={"repository": "a/b"},
        )
        summary = pb.TrajectorySummary(rewards=[make_reward(value=0.5)])
        console.operator.listed.append(
            scheduler_pb2.BatchGroup(
                group=pb.GroupRecord(task=task), phase=phase, trajectories=[summary]
            )
        )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
async def test_tasks_and_search_are_clean(browser: Browser, width: int, dark: bool) -> None:
    """No finding of axe-core, no error, and as wide as the window; by the keyboard alone. Matches
    are in bold and stay texts; a link leads to the turn, whose rewards are over the turns."""
    said = f"{HOSTILE} needle {HOSTILE}"
    messages = {"messages": [{"role": "user", "content": said}], "answer": {"role": "assistant"}}
    async with (
        served() as console,
        watched(browser, console.address, width=width, dark=dark) as one,
    ):
        page = one.page
        data_set_of(console)
        turns = [make_turn(index=0), make_turn(index=1, messages_json=json.dumps(messages))]
        console.pool.put("t:0:0", *turns)
        rewards = console.pool.stored["t:0:0"].rewards
        rewards.extend([make_reward("format", 0.25, turn_index=0), make_reward("x", -1.0)])
        await one.go("#/tasks")
        await page.wait_for_selector("section[aria-label='Held-out tasks'] tbody tr")
        assert await one.problems() == [] and await one.overflow_px() <= 0
        await page.locator("a", has_text="math").focus()
        await page.keyboard.press("Enter")
        await page.wait_for_selector("section[aria-label='Tasks'] tbody tr:has-text('a/b')")
        assert await one.problems() == [] and await one.overflow_px() <= 0
        await one.go("#/trajectories")
        await page.locator("input[name=text]").focus()
        await page.keyboard.type("needle")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("mark:has-text('needle')")
        await page.locator("summary").focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("input[name=where]")).to_be_visible(timeout=LIMIT_MS)
        assert await one.problems() == [] and await one.overflow_px() <= 0
        assert await page.locator("main img, main script").count() == 0
        await page.locator("tbody a").first.click()
        await page.wait_for_selector("section[aria-label='Rewards over turns'] td:has-text('0.25')")
        assert page.url.endswith("#/trajectories/t%3A0%3A0/1")
        assert await one.problems() == [] and await one.overflow_px() <= 0
        assert one.errors == []


async def test_search_continues_on_demand(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The button adds the next matches, and goes with the last ones."""
    monkeypatch.setattr(trajectory_list, "MOST_MATCHES", 2)
    async with served() as console, watched(browser, console.address) as one:
        for number in range(3):
            console.pool.put(f"t{number}:0:0", make_turn(messages_json="needle"))
        await one.go(f"#/trajectories/find/{quote('text=needle')}")
        rows = one.page.locator("tbody tr")
        await expect(rows).to_have_count(2, timeout=LIMIT_MS)
        await one.page.click("button:has-text('Search further')")
        await expect(rows).to_have_count(3, timeout=LIMIT_MS)
        await expect(one.page.locator(".sub")).to_have_text("3 matches", timeout=LIMIT_MS)
        assert await one.page.locator("button:has-text('Search further')").is_hidden()
        assert one.errors == []


async def test_reward_components_have_a_chart(browser: Browser) -> None:
    """One line for each name, once a step has any."""
    async with served() as console, watched(browser, console.address) as one:
        for step in (1, 2):
            await console.operator.steps.put(
                trainer_pb2.StepMetrics(step=step, reward_components={"tests": 0.5, "calls": -0.1})
            )
        await one.go("#/overview")
        chart = one.page.locator(".components section.chart")
        await expect(chart.locator("canvas")).to_have_count(1, timeout=LIMIT_MS)
        await expect(chart.locator(".u-legend")).to_contain_text("calls")
        assert await one.problems() == [] and one.errors == []
