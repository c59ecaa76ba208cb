"""The scaffolds of the scaffold report, each over its own protocol, against real processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from benchmarks.support.scaffolds.agents.bare import Bare
from benchmarks.support.scaffolds.agents.careful import Careful
from benchmarks.support.scaffolds.agents.text import Text
from forge.agents.environments import get_domain
from forge.agents.rollout import Gateway, Rollout, Scaffold
from forge.agents.scaffolds.blackbox import BlackBox
from forge.core.errors import InvalidArgument
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.rpc.channel import Channels
from forge.runtime.security.credentials import Security
from tests.support.gateway.stack import GatewayStack, check_exact, recorded

FAMILY = "chatml"
SCAFFOLDS: Mapping[str, Callable[..., Scaffold]] = {
    "blackbox": BlackBox,
    "careful": Careful,
    "bare": Bare,
    "text": Text,
}
CALL = '<tool_call>{"name": "find", "arguments": {"name": "Kim", "fact": "pet"}}</tool_call>'


def payload(asker: str) -> dict[str, Any]:
    """A question; the asker's name tells the engine what to say."""
    return {"asker": asker, "subject": "Kim", "field": "pet", "cards": {"Kim": {"pet": "owl"}}}


def rollout_of(stack: GatewayStack, gateway: Instance, name: str, channels: Channels) -> Rollout:
    trajectory_id = f"{name}:0:0"
    return Rollout(
        trajectory_id=trajectory_id,
        task_id=name,
        domain="qa",
        payload={},
        gateway=Gateway(
            instance_id=gateway.instance_id,
            http_url=f"http://{gateway.metadata['http']}",
            grpc_address=gateway.address,
            channel=channels.get(gateway.address),
        ),
        session_token=stack.token(trajectory_id),
        max_turns=4,
        max_tokens=200,
        temperature=None,
    )


@pytest.mark.parametrize("name", SCAFFOLDS)
async def test_each_scaffold_solves_a_task_with_a_tool(
    name: str, stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """It calls, reads the result and answers: two turns, exact, and the full outcome."""
    channels = Channels(Security(stack.pool.keyring, subject="test"))
    scaffold = SCAFFOLDS[name](timeout_s=60.0)
    episode = get_domain("qa").episode(payload(f"STEPS[[{CALL}|||owl]]"))
    try:
        rollout = rollout_of(stack, gateway, name, channels)
        transcript = await scaffold.run(rollout, episode)
        long = rollout_of(stack, gateway, f"{name}-long", channels)
        with pytest.raises(InvalidArgument, match="refused the task"):
            await scaffold.run(long, get_domain("qa").episode(payload("a b c d " * 4000)))
    finally:
        await scaffold.close()
        await channels.close()
    assert (transcript.turns, transcript.tool_calls, transcript.failed_calls) == (2, 1, ())
    assert [reward.value for reward in episode.score(transcript)] == [1.0]
    async with stack.agent(gateway, rollout.session_token) as session:
        await session.close(min_turns=2)
    trajectory = await recorded(stack, own_coordinator, rollout.trajectory_id)
    check_exact(stack, trajectory)
    # The answer's tokens are sampled one character at a time: a text cannot continue them.
    assert [turn.parent_turn for turn in trajectory.turns] == [-1, 0]
    if name != "text":
        record = json.loads(trajectory.turns[1].messages_json)
        assert [one["content"] for one in record["messages"]] == ["owl"]
