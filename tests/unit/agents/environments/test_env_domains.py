"""The four built-in domains: tasks, tools, scores, and a teacher that can solve them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from forge.agents.environments import DOMAINS, get_domain
from forge.agents.environments.base import Episode, ToolError, Transcript
from forge.agents.environments.teaching import Demonstration
from forge.core.errors import InvalidArgument, NotFound

NAMES = ("reasoning", "qa", "code", "general")
EPISODES = 12


def payload(name: str, seed: int) -> dict[str, Any]:
    return get_domain(name).generate(Random(seed))


def demonstration(name: str, seed: int, *, flawless: bool) -> Demonstration:
    shown: Demonstration = get_domain(name).demonstrate(  # type: ignore[attr-defined]
        payload(name, seed), Random(seed), flawless=flawless
    )
    return shown


async def outcome_of(name: str, seed: int, shown: Demonstration) -> float:
    """What an agent earns that does exactly what was shown."""
    episode = get_domain(name).episode(payload(name, seed))
    calls, failed, answer = 0, [], ""
    for message in (message for context in shown.contexts for message in context):
        if message["role"] != "assistant":
            continue
        answer = message["content"]
        for call in message.get("tool_calls", ()):
            calls += 1
            failed += await failures(episode, call["function"])
    transcript = Transcript(answer=answer, turns=calls + 1, tool_calls=calls, failed_calls=failed)
    rewards = episode.score(transcript)
    await episode.close()
    (outcome,) = (reward.value for reward in rewards if reward.kind == "outcome")
    return outcome


async def failures(episode: Episode, function: Mapping[str, str]) -> list[int]:
    try:
        await episode.call(function["name"], json.loads(function["arguments"]))
    except ToolError:
        return [0]
    return []


@pytest.mark.parametrize("name", NAMES)
async def test_flawless_teacher_earns_every_reward(name: str) -> None:
    """Each task can be solved with the real tools."""
    for seed in range(EPISODES):
        shown = demonstration(name, seed, flawless=True)
        assert await outcome_of(name, seed, shown) == 1.0, (seed, shown)


@pytest.mark.parametrize("name", NAMES)
async def test_imperfect_teacher_leaves_room_to_learn(name: str) -> None:
    """Its habits succeed sometimes: neither never nor always."""
    outcomes = [
        await outcome_of(name, seed, demonstration(name, seed, flawless=False))
        for seed in range(4 * EPISODES)
    ]
    assert 0.05 < sum(outcomes) / len(outcomes) < 0.8


async def test_teacher_demonstrates_programs_without_a_sandbox() -> None:
    """With the same results and errors as in the sandbox."""
    for seed in range(4 * EPISODES):
        episode = get_domain("code").episode(payload("code", seed))
        (context,) = demonstration("code", seed, flawless=False).contexts
        for asked, answered in itertools.pairwise(context):
            for call in asked.get("tool_calls", ()):
                function = call["function"]
                try:
                    result = await episode.call(function["name"], json.loads(function["arguments"]))
                except ToolError as error:
                    result = str(error)
                assert result == answered["content"]


@pytest.mark.parametrize("name", NAMES)
def test_task_is_a_function_of_its_seed(name: str) -> None:
    """The same seed gives the same JSON; another seed another task."""
    assert payload(name, 1) == payload(name, 1)
    assert json.loads(json.dumps(payload(name, 1))) == payload(name, 1)
    assert len({json.dumps(payload(name, seed)) for seed in range(20)}) > 15


@pytest.mark.parametrize("name", NAMES)
async def test_unknown_tool_is_a_tool_error(name: str) -> None:
    """A model may call any name; it gets an error and the episode continues."""
    episode = get_domain(name).episode(payload(name, 0))
    with pytest.raises(ToolError):
        await episode.call("launch", {"target": "moon"})
    assert episode.messages and episode.messages[0]["role"] == "system"


@pytest.mark.parametrize("name", NAMES)
def test_payload_without_its_keys_is_refused(name: str) -> None:
    """The error names the missing key."""
    with pytest.raises(InvalidArgument, match="payload"):
        get_domain(name).episode({})


def test_order_ships_once_and_half_a_solution_earns_a_quarter() -> None:
    """The general desk has state: a shipped order stays shipped."""
    task = payload("general", 3)
    episode = get_domain("general").episode(task)
    shelf = task["shelves"][task["item"]]
    run = episode.run  # type: ignore[attr-defined]
    assert run("ship", {"shelf": shelf, "city": "nowhere"}) == "shipped"
    with pytest.raises(ToolError, match="already"):
        run("ship", {"shelf": shelf, "city": task["cities"][task["recipient"]]})
    scored = episode.score(Transcript(answer="done", turns=2, tool_calls=2, failed_calls=[1]))
    assert {reward.name: reward.value for reward in scored} == {
        "order_shipped": 0.25,
        "failed_call": -1.0,
    }


def test_unknown_domain_lists_the_known_domains() -> None:
    """A typo in a task's domain is answered with the list."""
    with pytest.raises(NotFound, match="reasoning"):
        get_domain("reasonin")
    assert set(NAMES) <= set(DOMAINS)
