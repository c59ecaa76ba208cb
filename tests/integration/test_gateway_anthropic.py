"""Agents of Anthropic's unmodified SDK against real processes: gateway, pool, etcd, an engine."""

from __future__ import annotations

from typing import Any

import aiohttp
import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message

from forge.runtime.coordination import Coordinator, Instance
from forge.v1 import common_pb2
from tests.support.gateway.chat_templates import make_model
from tests.support.gateway.stack import GatewayStack, check_exact, recorded, token_tree

FAMILY = "qwen3"
LOOK: Any = {
    "name": "look",
    "description": "Look somewhere.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
ASK: dict[str, Any] = {"model": "policy", "max_tokens": 500}
THINK: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def call(at: str) -> str:
    """As the template spells it."""
    return f'<tool_call>\n{{"name": "look", "arguments": {{"at": "{at}"}}}}\n</tool_call>'


def user(*content: Any) -> Any:
    """A text, or blocks."""
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else [*content]}


def result(tool_use_id: str, content: Any, **fields: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": tool_use_id, "content": content}
    return block | fields


async def answer(client: AsyncAnthropic, *, streamed: bool, **asked: Any) -> Message:
    """One call, in either way."""
    if not streamed:
        message: Message = await client.messages.create(**(ASK | asked))
        return message
    async with client.messages.stream(**(ASK | asked)) as stream:
        return await stream.get_final_message()


async def closed(
    stack: GatewayStack,
    gateway: Instance,
    coordinator: Coordinator,
    trajectory_id: str,
    turns: int,
    *,
    cut: bool = False,
) -> common_pb2.Trajectory:
    """The trajectory as a trainer reads it, sealed; checked against the engine's log, unless the
    gateway `cut` answers that the engine would have gone on with."""
    async with stack.agent(gateway, stack.token(trajectory_id)) as agent:
        assert await agent.close(min_turns=turns) == turns
    trajectory = await recorded(stack, coordinator, trajectory_id)
    if not cut:
        check_exact(stack, trajectory)
    return trajectory


def said_in(turn: common_pb2.Turn) -> str:
    """The text that was sampled in a turn, as far as it is on record."""
    return make_model("qwen3").decode(turn.sampled.ids)


def assert_linear(trajectory: common_pb2.Trajectory) -> None:
    """Each turn continues the one before it, with all of its tokens."""
    lengths = token_tree(trajectory).lengths
    for index, turn in enumerate(trajectory.turns):
        assert turn.parent_turn == index - 1
        assert turn.prefix_tokens == (lengths[index - 1] if index else 0)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("thinking", [THINK, {}])
async def test_tool_loop_is_one_linear_trajectory(
    stack: GatewayStack,
    gateway: Instance,
    own_coordinator: Coordinator,
    streamed: bool,
    thinking: dict[str, Any],
) -> None:
    """Blocks sent back as they came continue the record, whether the agent sees thinking or not."""
    trajectory_id = f"loop:{int(streamed)}:{len(thinking)}"
    client = stack.anthropic(gateway, stack.token(trajectory_id))
    same: dict[str, Any] = thinking | {
        "streamed": streamed,
        "tools": [LOOK],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": "me"},
    }
    own_spelling = call("attic").replace(": ", ":")
    said = f"<think>\nTwo places.\n</think>\n\nGrüße, I look.\n{call('shelf')}\n{own_spelling}"
    history: list[Any] = [user(f"Look. SAY[[{said}]]")]
    first = await answer(client, messages=history, extra_body={"temperature": 0.5}, **same)
    kinds = ["thinking"] * bool(thinking) + ["text", "tool_use", "tool_use"]
    assert [block.type for block in first.content] == kinds
    assert first.stop_reason == "tool_use"
    shelf, attic = (block for block in first.content if block.type == "tool_use")
    assert (shelf.name, shelf.input, attic.input) == ("look", {"at": "shelf"}, {"at": "attic"})
    assert first.usage.cache_read_input_tokens
    assert first.usage.output_tokens_details is not None
    assert first.usage.output_tokens_details.thinking_tokens > 0

    again = f"<think>\nOnce more.\n</think>\n\n{call('cellar')}"
    results = [
        result(shelf.id, "a book"),
        result(attic.id, [{"type": "text", "text": f"dark SAY[[{again}]]"}], is_error=True),
    ]
    history += [{"role": "assistant", "content": first.content}, user(*results)]
    second = await answer(client, messages=history, **same)
    cellar = second.content[-1]
    assert cellar.type == "tool_use"
    history += [
        {"role": "assistant", "content": second.content},
        user(result(cellar.id, "a cat SAY[[<think>\nFine.\n</think>\n\nA book, a cat.]]")),
    ]
    third = await answer(client, messages=history, **same)
    assert third.content[-1].to_dict() == {"type": "text", "text": "A book, a cat."}
    assert (third.stop_reason, third.role, third.model) == ("end_turn", "assistant", "policy")

    trajectory = await closed(stack, gateway, own_coordinator, trajectory_id, 3)
    assert_linear(trajectory)
    assert [turn.temperature for turn in trajectory.turns] == [0.5, 1.0, 1.0]


async def test_questions_and_mixed_messages_make_no_branch(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """Text after tool results, new questions, and a moving cache mark."""
    trajectory_id = "mixed:0:0"
    client = stack.anthropic(gateway, stack.token(trajectory_id))
    history: list[Any] = [user(f"SAY[[{call('shelf')}]]")]
    first = await client.messages.create(messages=history, tools=[LOOK], **ASK)
    (use,) = first.content
    assert use.type == "tool_use"
    mark = {"cache_control": {"type": "ephemeral"}}
    history += [
        {"role": "assistant", "content": first.content},
        user(result(use.id, "a book"), {"type": "text", "text": "And? SAY[[Blue.]]"} | mark),
    ]
    second = await client.messages.create(messages=history, tools=[LOOK], **ASK)
    del history[-1]["content"][-1]["cache_control"]
    history += [
        {"role": "assistant", "content": second.content},
        user({"type": "text", "text": "Thanks. SAY[[Welcome.]]"} | mark),
    ]
    third = await client.messages.create(messages=history, tools=[LOOK], **ASK)
    assert third.content[0].type == "text"
    assert third.content[0].text == "Welcome."
    assert_linear(await closed(stack, gateway, own_coordinator, trajectory_id, 3))


async def test_stream_has_the_events_that_clients_expect(
    stack: GatewayStack, gateway: Instance
) -> None:
    """Blocks open, fill and close one after the other, and usage is complete at the end."""
    client = stack.anthropic(gateway, stack.token("events:0:0"))
    said = f"<think>\nHm.\n</think>\n\nI look.\n{call('shelf')}"
    stream = await client.messages.create(
        messages=[user(f"SAY[[{said}]]")],
        tools=[LOOK],
        stream=True,
        **(ASK | THINK),
    )
    events = [event async for event in stream]
    order = [event.type for event in events if event.type != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert order == ["message_start", *block * 3, "message_delta", "message_stop"]
    kinds = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert set(kinds) == {"thinking_delta", "signature_delta", "text_delta", "input_json_delta"}
    assert kinds.count("text_delta") > 3
    start, delta = events[0], events[-2]
    assert start.type == "message_start"
    assert delta.type == "message_delta"
    cached = delta.usage.cache_read_input_tokens
    assert cached
    assert start.message.usage.input_tokens == cached + (delta.usage.input_tokens or 0)
    assert delta.delta.stop_reason == "tool_use"


async def test_answers_end_at_stop_sequences_and_limits(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """At a stop sequence, which is named; at `max_tokens`; and at the end of the context."""
    trajectory_id = "ends:0:0"
    client = stack.anthropic(gateway, stack.token(trajectory_id))
    messages: list[Any] = [user("SAY[[one STOP two]]")]
    stopped = await client.messages.create(
        messages=messages, stop_sequences=["HALT", "STOP"], **ASK
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    assert stopped.content[0].to_dict() == {"type": "text", "text": "one "}
    short = await client.messages.create(messages=messages, model="policy", max_tokens=3)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    # An answer that is sampled one character at a time takes more tokens than its own script.
    long: list[Any] = [user(f"SAY[[{'look at the shelf ' * 200}]]")]
    full = await client.messages.create(messages=long, model="policy", max_tokens=5000)
    assert full.stop_reason == "model_context_window_exceeded"
    trajectory = await closed(stack, gateway, own_coordinator, trajectory_id, 3, cut=True)
    assert said_in(trajectory.turns[0]) == "one STOP"


@pytest.mark.parametrize("streamed", [False, True])
async def test_answer_without_parallel_tool_use_has_one_call(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator, streamed: bool
) -> None:
    """It ends with the first call, and the next turn continues it."""
    trajectory_id = f"single:{int(streamed)}:0"
    client = stack.anthropic(gateway, stack.token(trajectory_id))
    same: dict[str, Any] = {
        "streamed": streamed,
        "tools": [LOOK],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    history: list[Any] = [user(f"SAY[[{call('shelf')}\n{call('attic')}]]")]
    first = await answer(client, messages=history, **same)
    assert [block.type for block in first.content] == ["tool_use"]
    assert first.stop_reason == "tool_use"
    use = first.content[0]
    assert use.type == "tool_use"
    history += [
        {"role": "assistant", "content": first.content},
        user(result(use.id, "a book SAY[[A book.]]")),
    ]
    await answer(client, messages=history, **same)
    trajectory = await closed(stack, gateway, own_coordinator, trajectory_id, 2, cut=True)
    assert_linear(trajectory)
    assert said_in(trajectory.turns[0]) == call("shelf")


async def test_tool_choice_forces_or_forbids_a_call(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """`any` and `tool` put the beginning of the call into the prompt; `none` leaves calls as
    text."""
    trajectory_id = "choice:0:0"
    client = stack.anthropic(gateway, stack.token(trajectory_id))
    forced: list[Any] = [user('SAY[[{"at": "attic"}}\n</tool_call>]]')]
    for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
        made = await answer(
            client, streamed=False, messages=forced, tools=[LOOK], tool_choice=choice
        )
        assert [block.type for block in made.content] == ["tool_use"]
    free: list[Any] = [user(f"SAY[[{call('shelf')}]]")]
    none = await answer(
        client, streamed=False, messages=free, tools=[LOOK], tool_choice={"type": "none"}
    )
    assert [block.type for block in none.content] == ["text"]
    await closed(stack, gateway, own_coordinator, trajectory_id, 3)


async def test_count_tokens_is_exact_and_leaves_no_turn(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """It counts the prompt of the call, with the sampled ids of earlier answers."""
    trajectory_id = "count:0:0"
    client = stack.anthropic(gateway, stack.token(trajectory_id))
    history: list[Any] = [user("SAY[[Grüße aus dem Regal]]")]
    asked: dict[str, Any] = {"tools": [LOOK], "system": "Be brief.", "model": "policy"}
    for _ in range(2):
        counted = await client.messages.count_tokens(messages=history, **asked)
        made = await client.messages.create(messages=history, max_tokens=99, **asked)
        cached = made.usage.cache_read_input_tokens or 0
        assert counted.input_tokens == made.usage.input_tokens + cached
        history += [{"role": "assistant", "content": made.content}, user("Go on.")]
    assert_linear(await closed(stack, gateway, own_coordinator, trajectory_id, 2))


async def test_disconnect_aborts_the_call_and_records_its_tokens(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """A client that disconnects in mid-stream leaves a turn with the tokens sampled until then."""
    trajectory_id = "hangup:0:0"
    client = stack.anthropic(gateway, stack.token(trajectory_id))
    slow: list[Any] = [user(f"PACE[[0.1]] SAY[[{'x' * 200}]]")]
    async with client.messages.stream(messages=slow, **ASK) as stream:
        seen = 0
        async for _ in stream.text_stream:
            seen += 1
            if seen == 3:
                break
    trajectory = await closed(stack, gateway, own_coordinator, trajectory_id, 1, cut=True)
    (turn,) = trajectory.turns
    assert turn.finish_reason == common_pb2.FINISH_REASON_ABORTED
    assert 3 <= len(turn.sampled.ids) // 4 < 150


async def test_errors_are_the_sdk_s_exceptions(stack: GatewayStack, gateway: Instance) -> None:
    """Each has its type, a message and the id of its request."""
    token = stack.token("errors:0:0")
    hello: dict[str, Any] = {"messages": [user("hi")]} | ASK

    async def refused(key: str, expected: type[anthropic.APIStatusError], **changes: Any) -> Any:
        with pytest.raises(expected) as caught:
            await stack.anthropic(gateway, key).messages.create(**(hello | changes))
        assert caught.value.request_id == caught.value.body["request_id"]  # type: ignore[index]
        return caught.value.body["error"]  # type: ignore[index]

    error = await refused(token, anthropic.NotFoundError, model="claude")
    assert error == {"type": "not_found_error", "message": error["message"]}
    assert "'model' is" in error["message"]
    error = await refused("sk-ant-123", anthropic.AuthenticationError)
    assert error["type"] == "authentication_error"
    foreign = stack.token("errors:0:0", scopes=frozenset({"operator"}))
    error = await refused(foreign, anthropic.PermissionDeniedError)
    assert error["type"] == "permission_error"
    paper = {"type": "document", "source": {"type": "url", "url": "http://x/y.pdf"}}
    error = await refused(
        token, anthropic.BadRequestError, messages=[user("a"), user(paper, paper)]
    )
    assert error["type"] == "invalid_request_error"
    assert "messages[1].content[0]" in error["message"]
    assert "'document'" in error["message"]
    error = await refused(token, anthropic.BadRequestError, messages=[user("a b c d e " * 2000)])
    assert "4096" in error["message"]


async def test_call_of_a_closed_session_is_not_repeated(
    stack: GatewayStack, gateway: Instance
) -> None:
    """The SDK would repeat any 409; a header forbids it."""
    token = stack.token("conflict:0:0")
    async with stack.agent(gateway, token) as agent:
        await agent.close(abandon_reason="never begun")
    client = stack.anthropic(gateway, token, max_retries=5)
    with pytest.raises(anthropic.ConflictError) as caught:
        await client.messages.create(messages=[user("hi")], **ASK)
    assert caught.value.request.headers["x-stainless-retry-count"] == "0"


async def test_session_token_is_accepted_in_path_header_and_bearer(
    stack: GatewayStack, gateway: Instance
) -> None:
    """All are the same session."""
    base = f"http://{gateway.metadata['http']}"
    token = stack.token("ways:0:0")
    body = {"messages": [user("SAY[[yes]]")]} | ASK
    async with aiohttp.ClientSession() as http:
        for url, headers in (
            (f"{base}/s/{token}/v1/messages", {"x-api-key": "none"}),
            (f"{base}/v1/messages", {"x-api-key": token}),
            (f"{base}/v1/messages?beta=true", {"Authorization": f"Bearer {token}"}),
        ):
            async with http.post(url, json=body, headers=headers) as got:
                assert (await got.json())["content"] == [{"type": "text", "text": "yes"}]
                assert got.headers["request-id"].startswith("req_")
        async with http.post(f"{base}/v1/messages", json=body) as got:
            # Nobody said that it speaks Anthropic's protocol; the path does.
            assert (got.status, (await got.json())["type"]) == (401, "error")
    models = await stack.anthropic(gateway, token).models.list()
    assert [(model.id, model.max_input_tokens) for model in models.data] == [
        ("policy", 4096),
        ("model", 4096),
    ]


async def test_agent_executes_a_tool_defined_by_anthropic(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """The SDK's bash tool, by its type alone: the model reads its input schema and calls it."""
    client = stack.anthropic(gateway, stack.token("bash:0:0"))
    bash: Any = {"type": "bash_20250124", "name": "bash"}
    called = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    history = [user(f"List. SAY[[{called}]]")]
    first = await answer(client, streamed=False, messages=history, tools=[bash])
    (block,) = first.content
    assert block.type == "tool_use"
    assert (block.name, block.input) == ("bash", {"command": "ls"})
    history += [
        {"role": "assistant", "content": first.content},
        user(result(block.id, "a.txt SAY[[One file.]]")),
    ]
    await answer(client, streamed=True, messages=history, tools=[bash])
    trajectory = await closed(stack, gateway, own_coordinator, "bash:0:0", 2)
    assert trajectory.turns[1].parent_turn == 0
    prompt = make_model(FAMILY).decode(token_tree(trajectory).context(0))
    assert "restart" in prompt
