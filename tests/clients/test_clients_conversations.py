"""Every client, in every way it can be used, holds the same conversation.

The model calls a tool twice at once, then once more, then answers. What a client makes of that is
the client's; that it works, and that the pool has each turn with the ids that were sampled, ours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge.core.trajectory import NO_PARENT
from forge.runtime.coordination import Coordinator, Instance
from tests.support.clients.programs import (
    SEEN,
    STEPS,
    Client,
    argv_of,
    check_linear,
    context_text,
    environment,
    look_call,
    run_program,
    sealed,
)
from tests.support.gateway.stack import GatewayStack


def ways(name: str, program: str, *protocols: str, **fields: Any) -> list[Client]:
    """A client over each of the protocols, whole and streamed."""
    return [
        Client(name=name, program=program, protocol=protocol, stream=stream, **fields)
        for protocol in protocols
        for stream in (False, True)
    ]


def forced(call: str) -> str:
    """What is left to say of a call when the gateway has begun it."""
    return call.partition('"name":"')[2]


def final_answer(text: str) -> str:
    return look_call(text).replace('"look"', '"final_answer"').replace('"at"', '"answer"')


def code(text: str) -> str:
    return f"Thought: I will see.\n<code>\n{text}\n"


# It asks for a call with tool_choice="required", and retells its history: calls become text.
SMOL_STEPS = tuple(
    forced(call)
    for call in (
        f"{look_call('shelf')}\n{look_call('box')}",
        look_call("door"),
        final_answer(STEPS[-1]),
    )
)
# Its calls are Python, which ends at a stop string.
SMOL_CODE = (
    code("print(look('shelf'), look('box'))"),
    code("print(look('door'))"),
    code(f"final_answer({STEPS[-1]!r})"),
)
CLIENTS = [
    *ways("openai", "openai_chat.py", "chat"),
    *ways("openai", "openai_responses.py", "responses"),
    *ways("openai", "openai_responses.py", "responses", words=("previous",)),
    Client(
        name="openai",
        program="openai_responses.py",
        protocol="responses",
        words=("socket",),
        stream=True,
    ),
    *ways("anthropic", "anthropic_messages.py", "messages"),
    *ways("google-genai", "google_genai.py", "gemini"),
    *ways("openai-agents", "agents_sdk.py", "chat", "responses"),
    *ways("pydantic-ai", "pydantic_ai_agent.py", "chat", "responses"),
    *ways("langgraph", "langchain_agent.py", "chat", "responses", "messages"),
    *ways("litellm", "litellm_sdk.py", "chat"),
    Client(name="litellm", program="litellm_sdk.py", protocol="messages"),
    # A streamed call without a text gets one from it: "[System: Empty message content ...]".
    Client(
        name="litellm", program="litellm_sdk.py", protocol="messages", stream=True, linear=False
    ),
    *ways("smolagents", "smolagents_agent.py", "chat", steps=SMOL_STEPS, linear=False),
    *ways(
        "smolagents",
        "smolagents_agent.py",
        "chat",
        steps=SMOL_CODE,
        words=("code",),
        linear=False,
    ),
    *ways("strands-agents", "strands_agent.py", "chat"),
    *ways("openai (Node)", "openai_chat.mjs", "chat"),
    *ways("openai (Node)", "openai_responses.mjs", "responses"),
    *ways("@anthropic-ai/sdk (Node)", "anthropic_messages.mjs", "messages"),
    *ways("ai (Node)", "ai_sdk.mjs", "chat", "responses", "messages"),
]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.key)
async def test_conversation_with_tools_is_recorded(
    client: Client,
    stack: GatewayStack,
    gateway: Instance,
    clients_coordinator: Coordinator,
    matrix: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """The client gets its answer, and the pool has three exact turns with all messages."""
    row = matrix(client.row)
    trajectory_id = f"{client.key}:0:0"
    env = environment(gateway, stack.token(trajectory_id), tmp_path, in_path=False)
    report = await run_program(argv_of(client), env)
    row.version = report.version
    assert report.answer == STEPS[-1]
    assert report.pieces > 3 or not client.stream
    trajectory = await sealed(stack, gateway, clients_coordinator, trajectory_id)
    assert len(trajectory.turns) == len(client.steps)
    last = context_text(stack, trajectory, len(trajectory.turns) - 1)
    assert [seen for seen in SEEN if seen not in last] == []
    if client.linear:
        check_linear(trajectory)
    else:
        # A branch still shares what was not rewritten: system prompt, tools and task.
        assert all(turn.parent_turn != NO_PARENT for turn in trajectory.turns[1:])
