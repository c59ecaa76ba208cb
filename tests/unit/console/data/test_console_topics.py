"""Topics: one latest state, read only while a page watches."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from forge.core.errors import Unavailable
from forge.v1 import trainer_pb2
from services.console.data.steps import FIELDS, MAPS, Steps
from services.console.data.topics import START, News, Poll, pause_s
from tests.support.console.page import FakeOperator


def step(number: int, reward: float = 0.5) -> trainer_pb2.StepMetrics:
    return trainer_pb2.StepMetrics(
        step=number, mean_reward=reward, reward_by_domain={"code": reward}
    )


def steps(most: int = 1000) -> Steps:
    return Steps(News(), FakeOperator().tail, most=most)


def rows(topic: Steps, cursor: tuple[int, int] = START) -> tuple[dict[str, Any], tuple[int, int]]:
    payload, after = topic.since(cursor)
    assert payload is not None
    return json.loads(payload), after


def numbers(event: dict[str, Any]) -> list[int]:
    return [row[0] for row in event["rows"]]


def test_page_gets_all_steps_and_then_new_ones() -> None:
    """The rewards of domains are last in a row."""
    topic = steps()
    for number in (1, 2):
        topic.add(step(number))
    event, cursor = rows(topic)
    names = [*FIELDS, *MAPS]
    assert (event["anew"], event["fields"], numbers(event)) == (True, names, [1, 2])
    assert event["rows"][0][-1] == {"code": 0.5}
    assert topic.since(cursor) == (None, cursor)
    topic.add(step(3))
    event, _ = rows(topic, cursor)
    assert (event["anew"], numbers(event)) == (False, [3])


def test_repeated_step_replaces_later_ones_in_every_page() -> None:
    """A trainer that restored checkpoint 1 takes step 2 again."""
    topic = steps()
    for number in (1, 2, 3):
        topic.add(step(number))
    _, cursor = rows(topic)
    topic.add(step(2, reward=0.75))
    event, _ = rows(topic, cursor)
    assert event["anew"] and numbers(event) == [1, 2]
    assert event["rows"][1][FIELDS.index("mean_reward")] == 0.75


def test_steps_are_bounded_and_newest_stay() -> None:
    """The older half loses every second step."""
    topic = steps(most=100)
    for number in range(1, 1001):
        topic.add(step(number))
    found = numbers(rows(topic)[0])
    assert len(found) <= 100
    assert found == sorted(found)
    assert found[0] == 1 and found[-40:] == [*range(961, 1001)]


async def test_topic_is_read_only_while_watched() -> None:
    """Without a page the services get no calls."""
    reads = 0

    async def read() -> int:
        nonlocal reads
        reads += 1
        return reads

    news = News()
    topic = Poll("queue", news, read, period_s=0.0, timeout_s=5.0)
    task = asyncio.create_task(topic.run())
    for _ in range(5):
        await asyncio.sleep(0)
    assert reads == 0
    with topic.watch():
        while reads < 3:
            await news.next().wait()
    for _ in range(5):
        await asyncio.sleep(0)
    ended = reads
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    assert reads == ended


async def test_equal_state_is_sent_once() -> None:
    """A page would draw its tables again, under the pointer and the keyboard focus."""
    answers = [{"groups": 1}, {"groups": 1}, {"groups": 2}]

    async def read() -> dict[str, int]:
        return answers.pop(0)

    topic = Poll("tasks", News(), read, period_s=0.0, timeout_s=5.0)
    await topic.refresh()
    _, cursor = topic.since(START)
    await topic.refresh()
    assert topic.since(cursor) == (None, cursor)
    await topic.refresh()
    payload, _ = topic.since(cursor)
    assert payload is not None and json.loads(payload)["state"] == {"groups": 2}


async def test_failed_read_keeps_the_last_state() -> None:
    """The error is beside it."""
    answers: list[int | Exception] = [7, Unavailable("no scheduler leads")]

    async def read() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    topic = Poll("queue", News(), read, period_s=0.0, timeout_s=5.0)
    await topic.refresh()
    await topic.refresh()
    payload, _ = topic.since(START)
    assert payload is not None
    event = json.loads(payload)
    assert (event["state"], event["error"]) == (7, "no scheduler leads")


def test_slow_reads_are_rarer() -> None:
    """A large queue costs the scheduler some milliseconds, a busy one seconds."""
    assert pause_s(1.0, 0.01) == 1.0
    assert pause_s(1.0, 2.0) == 18.0


async def test_read_has_a_deadline() -> None:
    """A service that hangs delays its topic alone."""

    async def read() -> None:
        await asyncio.Event().wait()

    topic = Poll("queue", News(), read, period_s=0.0, timeout_s=0.01)
    await topic.refresh()
    payload, _ = topic.since(START)
    assert payload is not None
    assert "no answer" in json.loads(payload)["error"]
