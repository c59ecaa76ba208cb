"""Responses of models beside the policy are stored as the policy's own."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
import pytest_asyncio

from forge.runtime.coordination import Coordinator, Instance
from tests.support.gateway.durable_turns import until_durable
from tests.support.gateway.stack import GatewayStack, check_exact, recorded

NAMES = ("gateway-stored-1", "gateway-stored-2")
TOOLS: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]


@pytest.fixture(scope="module")
def served(stack: GatewayStack) -> None:
    """Two gateways with an older version of the policy, whose records have at most 1 KiB."""
    stack.start_engine("engine-older", "--serving-group", "older")
    models = {"older": {"kind": "version", "open": True, "recorded_kib": 1}}
    for name in NAMES:
        stack.start_gateway(name, "--models", json.dumps(models))


@pytest_asyncio.fixture
async def gateways(
    stack: GatewayStack, served: None, own_coordinator: Coordinator
) -> list[Instance]:
    await own_coordinator.discover("router@older").wait(timeout_s=120.0)
    return [await stack.gateway(own_coordinator, name) for name in NAMES]


async def test_response_of_another_model_is_continued_and_retrieved(
    stack: GatewayStack, gateways: list[Instance], own_coordinator: Coordinator
) -> None:
    """By default, without `store`; by itself, by the policy, and at another gateway."""
    trajectory_id = "stored:0:0"
    here, there = [stack.openai(one, stack.token(trajectory_id)) for one in gateways]
    first = await here.responses.create(
        model="older", input="SAY[[one]]", instructions="Be brief.", tools=TOOLS
    )
    second = await here.responses.create(
        model="older",
        input="SAY[[two]]",
        instructions="Be brief.",
        previous_response_id=first.id,
        tools=TOOLS,
    )
    assert (first.output_text, second.output_text) == ("one", "two")
    assert second.usage and first.usage
    assert second.usage.input_tokens > first.usage.input_tokens
    policy = await here.responses.create(
        model="policy", input="SAY[[three]]", previous_response_id=second.id
    )
    assert policy.output_text == "three"
    kept = await here.responses.retrieve(second.id)
    assert (kept.output_text, kept.model, kept.instructions) == ("two", "older", "Be brief.")
    assert kept.usage and kept.usage.total_tokens == second.usage.total_tokens
    assert [tool.type for tool in kept.tools] == ["function"]
    await until_durable(stack, own_coordinator, trajectory_id, 3)
    elsewhere = await there.responses.create(
        model="older", input="SAY[[four]]", previous_response_id=second.id
    )
    assert elsewhere.output_text == "four"
    assert (await there.responses.retrieve(first.id)).output_text == "one"
    await there.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await there.responses.retrieve(first.id)
    async with stack.agent(gateways[1], stack.token(trajectory_id)) as agent:
        await agent.close(min_turns=4)
    trajectory = await recorded(stack, own_coordinator, trajectory_id)
    # The samples of the other model are no columns of the trajectory.
    check_exact(stack, trajectory, lost=3)
    asked = json.loads(trajectory.turns[1].messages_json)["messages"]
    assert [message["content"] for message in asked] == [
        "Be brief.",
        "SAY[[one]]",
        "one",
        "SAY[[two]]",
    ]
    assert [turn.other_model.name for turn in trajectory.turns] == ["older", "older", "", "older"]


async def test_response_that_is_not_stored_is_unknown(
    stack: GatewayStack, gateways: list[Instance]
) -> None:
    """With `store: false`, and with a conversation above `recorded_kib`, which the record lacks."""
    client = stack.openai(gateways[0], stack.token("unstored:0:0"))
    for fields in ({"store": False, "input": "SAY[[a]]"}, {"input": f"{'x' * 1500} SAY[[a]]"}):
        response = await client.responses.create(model="older", **fields)
        assert response.output_text == "a"
        with pytest.raises(openai.BadRequestError, match="not found"):
            await client.responses.create(
                model="older", input="hi", previous_response_id=response.id
            )
