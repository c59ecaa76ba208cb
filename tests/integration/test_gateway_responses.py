"""OpenAI's Responses API through the unmodified SDK, against real processes."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.responses import Response

from forge.runtime.coordination import Coordinator, Instance
from forge.v1 import common_pb2
from tests.support.gateway.durable_turns import until_durable
from tests.support.gateway.stack import GatewayStack, closed, token_tree

FAMILY = "qwen3"
TOOL: Any = {
    "type": "function",
    "name": "look",
    "description": "Look somewhere.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{{"name": "look", "arguments": {{"at":"{}"}}}}\n</tool_call>'
TWO_CALLS = f"<think>\nhm\n</think>\n\nI look.\n{CALL.format('a')}\n{CALL.format('b')}"


@pytest.fixture(scope="module")
def stack(stack: GatewayStack) -> GatewayStack:
    """With a second gateway, which has room for one session."""
    stack.start_gateway("gateway-1", "--sessions.max-sessions", "1")
    return stack


async def ask(client: AsyncOpenAI, *, stream: bool, **asked: Any) -> Response:
    """One response, however it comes."""
    if not stream:
        created: Response = await client.responses.create(model="policy", **asked)
        return created
    async with client.responses.stream(model="policy", **asked) as events:
        # The helper also checks that what it puts together is what the last event has.
        seen = [event async for event in events]
    last = seen[-1]
    assert last.type in ("response.completed", "response.incomplete")
    return last.response


def results(response: Response) -> list[Any]:
    """What the tools answer to each call of a response."""
    calls = [item for item in response.output if item.type == "function_call"]
    return [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": f"{json.loads(call.arguments)['at']} is empty SAY[[Nothing there.]]",
        }
        for call in calls
    ]


def check_linear(trajectory: common_pb2.Trajectory) -> None:
    """Each turn continues the one before it, to its last token."""
    lengths = [0, *token_tree(trajectory).lengths]
    assert [turn.parent_turn for turn in trajectory.turns] == list(
        range(-1, len(trajectory.turns) - 1)
    )
    assert [turn.prefix_tokens for turn in trajectory.turns] == lengths[:-1]


@pytest.mark.parametrize("how", ["items", "without ids", "references"])
@pytest.mark.parametrize("stream", [False, True])
async def test_tool_loop_by_echoed_items(
    stack: GatewayStack,
    gateway: Instance,
    own_coordinator: Coordinator,
    stream: bool,
    how: str,
) -> None:
    """An agent that sends all items again, whole or by their ids, makes one linear trajectory."""
    trajectory_id = f"echo-{how.replace(' ', '-')}:{int(stream)}:0"
    client = stack.openai(gateway, stack.token(trajectory_id))
    asked: dict[str, Any] = {"tools": [TOOL], "instructions": "Be brief.", "stream": stream}
    history: list[Any] = [{"role": "user", "content": f"Look. SAY[[{TWO_CALLS}]]"}]
    first = await ask(client, input=history, temperature=0.5, **asked)
    assert [item.type for item in first.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert (first.status, first.output_text, first.temperature) == ("completed", "I look.", 0.5)
    assert first.usage is not None
    assert first.usage.input_tokens_details.cached_tokens > 0
    assert 0 < first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens
    for item in first.output:
        if how == "references":
            history.append({"type": "item_reference", "id": item.id})
        else:
            ids = {"id"} if how == "without ids" else set()
            history.append(item.model_dump(exclude_none=True, exclude=ids))
    history += results(first)
    second = await ask(client, input=history, **asked)
    assert (second.status, second.output_text) == ("completed", "Nothing there.")

    trajectory = await closed(stack, own_coordinator, gateway, trajectory_id)
    check_linear(trajectory)
    assert trajectory.turns[0].temperature == 0.5


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_loop_by_previous_response_id(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator, stream: bool
) -> None:
    """An agent that sends only new items makes the same trajectory."""
    trajectory_id = f"previous:{int(stream)}:0"
    client = stack.openai(gateway, stack.token(trajectory_id))
    asked: dict[str, Any] = {"tools": [TOOL], "instructions": "Be brief.", "stream": stream}
    first = await ask(client, input=f"Look. SAY[[{TWO_CALLS}]]", **asked)
    second = await ask(client, input=results(first), previous_response_id=first.id, **asked)
    assert (second.output_text, second.previous_response_id) == ("Nothing there.", first.id)
    third = await ask(
        client, input="SAY[[Bye.]]", previous_response_id=second.id, tools=[TOOL], stream=stream
    )
    assert third.output_text == "Bye."

    trajectory = await closed(stack, own_coordinator, gateway, trajectory_id)
    one, two, three = trajectory.turns
    assert (one.parent_turn, two.parent_turn) == (-1, 0)
    assert two.prefix_tokens == token_tree(trajectory).lengths[0]
    # Instructions are not carried over: without them the third context is another one.
    assert three.prefix_tokens < two.prefix_tokens


async def test_response_can_be_continued_twice(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """The second continuation is a branch of the same tree."""
    trajectory_id = "fork:0:0"
    client = stack.openai(gateway, stack.token(trajectory_id))
    root = await ask(client, input="SAY[[one]]", stream=False)
    for said in ("left", "right"):
        text = f"SAY[[{said}]]"
        fork = await ask(client, input=text, previous_response_id=root.id, stream=False)
        assert fork.output_text == said
    trajectory = await closed(stack, own_coordinator, gateway, trajectory_id)
    length = token_tree(trajectory).lengths[0]
    assert [turn.parent_turn for turn in trajectory.turns[:2]] == [-1, 0]
    # The second fork shares with the first what the template writes before the user's text.
    assert all(turn.prefix_tokens >= length for turn in trajectory.turns[1:])


async def test_responses_outlive_their_gateway_and_the_session_in_memory(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """Another gateway finds a response by its id, also after an eviction."""
    trajectory_id = "moved:0:0"
    token = stack.token(trajectory_id)
    first = await ask(
        stack.openai(gateway, token),
        input="SAY[[one]]",
        instructions="Be brief.",
        metadata={"step": "1"},
        stream=False,
    )
    await until_durable(stack, own_coordinator, trajectory_id, 1)
    other = await stack.gateway(own_coordinator, "gateway-1")
    # It has room for one session: the next is asked to come again until that one is on disk.
    client = stack.openai(other, token, max_retries=5)
    crowd = stack.openai(other, stack.token("crowd:0:0"), max_retries=5)
    asked: dict[str, Any] = {"instructions": "Be brief.", "stream": False}
    second = await ask(client, input="SAY[[two]]", previous_response_id=first.id, **asked)
    await until_durable(stack, own_coordinator, trajectory_id, 2)
    await ask(crowd, input="SAY[[x]]", stream=False)
    assert await client.responses.retrieve(first.id) == first
    third = await ask(client, input="SAY[[three]]", previous_response_id=second.id, **asked)
    assert third.output_text == "three"
    await until_durable(stack, own_coordinator, trajectory_id, 3)
    # The first gateway still has the session as it left it.
    back = stack.openai(gateway, token)
    await ask(back, input="SAY[[four]]", previous_response_id=third.id, **asked)
    check_linear(await closed(stack, own_coordinator, gateway, trajectory_id))


async def test_deletion_outlives_the_session_in_memory(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """A gateway that rebuilds the session does not know the response, with or without later
    turns."""
    trajectory_id = "deleted:0:0"
    token = stack.token(trajectory_id)
    client = stack.openai(gateway, token)
    gone = await ask(client, input="SAY[[gone]]", stream=False)
    kept = await ask(client, input="SAY[[kept]]", stream=False)
    await client.responses.delete(gone.id)
    await until_durable(stack, own_coordinator, trajectory_id, 2)
    second = await stack.gateway(own_coordinator, "gateway-1")
    # It has room for one session, and may still have another test's.
    other = stack.openai(second, token, max_retries=5)
    assert await other.responses.retrieve(kept.id) == kept
    with pytest.raises(NotFoundError, match=gone.id):
        await other.responses.retrieve(gone.id)


async def test_unknown_and_foreign_responses_are_not_found(
    stack: GatewayStack, gateway: Instance
) -> None:
    """An id of another session, an invented, a deleted or an unstored one: each by name."""
    foreign = stack.openai(gateway, stack.token("ids:1:0"))
    client = stack.openai(gateway, stack.token("ids:0:0"))
    theirs = await ask(foreign, input="SAY[[secret]]", stream=False)
    unstored = await ask(client, input="SAY[[gone]]", store=False, stream=False)
    deleted = await ask(client, input="SAY[[gone]]", stream=False)
    assert (await client.responses.retrieve(deleted.id)).output_text == "gone"
    await client.responses.delete(deleted.id)
    for unknown in (theirs.id, "resp_nonsense", unstored.id, deleted.id):
        with pytest.raises(BadRequestError, match=unknown) as refused:
            await ask(client, input="hi", previous_response_id=unknown, stream=False)
        assert refused.value.code == "previous_response_not_found"
        with pytest.raises(NotFoundError, match=unknown):
            await client.responses.retrieve(unknown)
        with pytest.raises(NotFoundError, match=unknown):
            await client.responses.delete(unknown)


async def test_required_calls_and_limits_are_kept(stack: GatewayStack, gateway: Instance) -> None:
    """A required tool is called; one call is one call; a truncated answer says so."""
    client = stack.openai(gateway, stack.token("limits:0:0"))
    asked: dict[str, Any] = {"tools": [TOOL], "stream": False}
    forced = await ask(
        client,
        input='SAY[[{"at": "c"}}\n</tool_call>]]',
        tool_choice={"type": "function", "name": "look"},
        **asked,
    )
    (call,) = forced.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("look", {"at": "c"})
    single = await ask(client, input=f"SAY[[{TWO_CALLS}]]", parallel_tool_calls=False, **asked)
    assert [item.type for item in single.output].count("function_call") == 1
    short = await ask(client, input="SAY[[much too long]]", max_output_tokens=3, stream=True)
    assert (short.status, short.output_text) == ("incomplete", "muc")
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"
    with_logprobs = await ask(
        client, input="SAY[[abc]]", include=["message.output_text.logprobs"], stream=False
    )
    (message,) = with_logprobs.output
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    assert [p.token for p in message.content[0].logprobs or ()][:3] == ["a", "b", "c"]


async def test_interrupted_stream_ends_with_its_reason(
    stack: GatewayStack, gateway: Instance
) -> None:
    """The text sent before stays, and the SDK raises the error."""
    token = stack.token("broken:0:0")
    client = stack.openai(gateway, token)
    stream = await client.responses.create(
        model="policy", input=f"PACE[[0.2]] SAY[[{'x' * 200}]]", stream=True
    )
    events: list[Any] = []
    async with stack.agent(gateway, token) as agent:
        with pytest.raises(APIError, match="the session was closed during this call"):
            async for event in stream:
                if event.type == "response.output_text.delta" and not any(
                    seen.type == event.type for seen in events
                ):
                    await agent.close(abandon_reason="enough")
                events.append(event)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text.startswith("x")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"input": ""}, None),
        ({"input": []}, "input must not be empty"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "'msg_1'"),
        ({"input": "hi", "tools": [{"type": "file_search"}]}, "'file_search'"),
        ({"input": "hi", "truncation": "auto"}, "'auto'"),
        ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens = 0"),
        ({"input": "hi", "tool_choice": "required"}, "no tools"),
        ({"input": "a b c d e " * 2000}, "4096"),
    ],
)
async def test_unsupported_requests_are_refused(
    stack: GatewayStack, gateway: Instance, asked: dict[str, Any], says: str | None
) -> None:
    """Each is the SDK's own exception with the fault, streamed or not."""
    client = stack.openai(gateway, stack.token("refused:0:0"))
    for stream in (False, True):
        if says is None:
            assert (await ask(client, stream=stream, **asked)).status == "completed"
            continue
        # A stream of a prompt that is too long begins, as from OpenAI, and has an error event.
        expected = APIError if stream and says == "4096" else BadRequestError
        with pytest.raises(expected, match=says):
            await ask(client, stream=stream, **asked)


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_of_a_coding_agent_are_called_and_restored(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator, stream: bool
) -> None:
    """A function of a namespace, a custom tool and a web search, which is left out and named in a
    header: one linear trajectory."""
    trajectory_id = f"tools:{int(stream)}:0"
    client = stack.openai(gateway, stack.token(trajectory_id))
    tools: list[Any] = [
        {"type": "namespace", "name": "notes", "description": "Notes.", "tools": [TOOL]},
        {"type": "custom", "name": "patch", "description": "Patches."},
        {"type": "web_search"},
    ]
    said = (
        "<think>\nhm\n</think>\n\n"
        + CALL.format("a").replace('"look"', '"notes__look"')
        + ('\n<tool_call>\n{"name": "patch", "arguments": {"input": "+ \\"a\\"\\n"}}\n</tool_call>')
    )
    history: list[Any] = [{"role": "user", "content": f"Look. SAY[[{said}]]"}]
    raw = await client.responses.with_raw_response.create(
        model="policy", input=history, tools=tools, store=False
    )
    assert raw.headers["X-Forge-Tools-Omitted"] == "web_search"
    first = await ask(client, stream=stream, input=history, tools=tools)
    _, look, patch = first.output
    assert look.type == "function_call"
    assert (look.namespace, look.name) == ("notes", "look")
    assert patch.type == "custom_tool_call"
    assert (patch.name, patch.input) == ("patch", '+ "a"\n')
    history += [item.model_dump(exclude_none=True) for item in first.output]
    history += [
        {"type": "function_call_output", "call_id": look.call_id, "output": "empty"},
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "SAY[[Done.]]"},
    ]
    second = await ask(client, stream=stream, input=history, tools=tools)
    assert second.output_text == "Done."
    stored = await client.responses.retrieve(first.id)
    kept = [item.to_dict() | {"parsed_arguments": None} for item in stored.output]
    assert kept == [item.to_dict() | {"parsed_arguments": None} for item in first.output]
    assert [tool.type for tool in stored.tools] == ["namespace", "custom"]
    trajectory = await closed(stack, own_coordinator, gateway, trajectory_id)
    assert trajectory.turns[-1].parent_turn >= 0
    lengths = token_tree(trajectory).lengths
    assert trajectory.turns[-1].prefix_tokens == lengths[trajectory.turns[-1].parent_turn]


async def test_session_in_the_path(stack: GatewayStack, gateway: Instance) -> None:
    """A program that has only a base URL has the same API, every event with its name."""
    base = f"http://{gateway.metadata['http']}/s/{stack.token('path:0:0')}/v1"
    body = {"model": "policy", "input": "SAY[[yes]]", "stream": True}
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{base}/responses", json=body) as got:
            lines = (await got.text()).splitlines()
        events = [line.removeprefix("event: ") for line in lines if line.startswith("event")]
        data = [json.loads(line[6:]) for line in lines if line.startswith("data")]
        assert [one["type"] for one in data] == events
        assert [one["sequence_number"] for one in data] == list(range(len(data)))
        async with http.get(f"{base}/responses/{data[-1]['response']['id']}") as got:
            assert (await got.json())["output"] == data[-1]["response"]["output"]
