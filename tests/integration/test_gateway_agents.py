"""Agents against real processes: gateway, pool, etcd and a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from forge.client.reward_events import reward_event
from forge.client.sessions.turns import Answer
from forge.core.errors import FailedPrecondition
from forge.core.token_columns import float32_array, int32_array
from forge.runtime.coordination import Coordinator, Instance
from forge.v1 import common_pb2
from tests.support.gateway.stack import GatewayStack, check_exact, recorded, token_tree

LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at":"shelf"}}\n</tool_call>'


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def test_sampling_policy_of_a_session_replaces_the_agents_parameters(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """Temperature, cut and seed of a greedy agent are replaced, named to it, and recorded with the
    turn; over gRPC the same."""
    trajectory_id = "greedy:0:0"
    token = stack.token(trajectory_id, sampling="override")
    client = stack.openai(gateway, token)
    raw = await client.chat.completions.with_raw_response.create(
        model="policy", messages=[user("SAY[[One.]]")], temperature=0, top_p=0.5, seed=1
    )
    changed = "temperature=1 (asked 0), top_p=1 (asked 0.5), seed=random (asked 1)"
    assert raw.headers["x-forge-sampling"] == changed
    async with client.chat.completions.with_streaming_response.create(
        model="policy", messages=[user("SAY[[Two.]]")], temperature=0, stream=True
    ) as streamed:
        assert streamed.headers["x-forge-sampling"] == "temperature=1 (asked 0)"
    plain = await client.chat.completions.with_raw_response.create(
        model="policy", messages=[user("SAY[[Three.]]")]
    )
    assert "x-forge-sampling" not in plain.headers
    async with stack.agent(gateway, token) as agent:
        assert await agent.close(reward_event("solved", 1.0), min_turns=2, after_agent_s=1e6) >= 2
    first, *_, last = (await recorded(stack, own_coordinator, trajectory_id)).turns
    assert (first.temperature, first.top_p, first.top_k) == (1.0, 1.0, 0)
    assert (first.asked_temperature, first.asked_top_p) == (0.0, 0.5)
    assert first.HasField("asked_temperature") and not first.HasField("asked_top_k")
    assert not last.HasField("asked_temperature")


async def test_labels_of_calls_are_recorded_and_turns_are_named(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """Headers and key suffixes name the agent and exclude its calls; answers name their turn, a
    stream in a comment before its end."""
    trajectory_id = "marks:0:0"
    token = stack.token(trajectory_id)
    client = stack.openai(gateway, token)
    system: Any = {"role": "system", "content": "You are careful."}
    raw = await client.chat.completions.with_raw_response.create(
        model="policy",
        messages=[system, user("SAY[[One.]]")],
        tools=[LOOK],
        extra_headers={"X-Forge-Agent": "worker"},
    )
    assert raw.headers["x-forge-turn"] == "0"
    titles = stack.openai(gateway, f"{token}~titles")
    async with titles.chat.completions.with_streaming_response.create(
        model="policy", messages=[user("SAY[[Two.]]")], stream=True
    ) as streamed:
        lines = [line async for line in streamed.iter_lines()]
    assert [line for line in lines if line.startswith(":")] == [": X-Forge-Turn: 1"]
    pieces = await titles.chat.completions.create(
        model="policy", messages=[user("SAY[[Three.]]")], stream=True
    )
    text = "".join([piece.choices[0].delta.content or "" async for piece in pieces])
    assert text == "Three."
    async with stack.agent(gateway, token) as agent:
        assert await agent.close(reward_event("solved", 1.0), min_turns=3, after_agent_s=1e6) == 3
    work, title, _ = (await recorded(stack, own_coordinator, trajectory_id)).turns
    assert (work.agent, work.HasField("train"), work.offers_tools) == ("worker", False, True)
    assert (title.agent, title.train, title.offers_tools) == ("titles", False, False)
    assert title.HasField("train")
    assert (len(work.system_digest), title.system_digest) == (8, b"")


async def test_openai_tool_conversation_is_recorded_exactly(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """An unmodified agent's tool loop ends in one linear trajectory with the ids sampled."""
    trajectory_id = "tools:0:0"
    client = stack.openai(gateway, stack.token(trajectory_id))
    model = (await client.models.list()).data[0].id
    messages: list[Any] = [user(f"Look. SAY[[I will look.\n{CALL}]]")]
    first = await client.chat.completions.create(
        model=model, messages=messages, tools=[LOOK], temperature=0.5, max_tokens=500
    )
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I will look."
    assert choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "shelf"})
    assert first.usage is not None
    assert first.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens
    messages += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "a book SAY[[A book.]]"},
    ]
    second = await client.chat.completions.create(model=model, messages=messages, tools=[LOOK])
    assert second.choices[0].message.content == "A book."
    assert second.choices[0].finish_reason == "stop"
    async with stack.agent(gateway, stack.token(trajectory_id)) as agent:
        closed = agent.close(reward_event("solved", 1.0), min_turns=2, after_agent_s=1e6)
        assert await closed == 2

    trajectory = await recorded(stack, own_coordinator, trajectory_id)
    check_exact(stack, trajectory)
    one, two = trajectory.turns
    assert (two.parent_turn, two.prefix_tokens) == (0, token_tree(trajectory).lengths[0])
    assert one.temperature == 0.5
    assert list(int32_array(two.sampled.weight_versions)) == [7] * 8
    assert float32_array(two.sampled.logprobs)[0] == -0.5
    assert (one.timings.queue_s, one.timings.prefill_s, one.timings.decode_s) == (0.25, 0.5, 0.75)
    assert two.timings.agent_s > 0
    assert (one.turns_before, two.turns_before) == (0, 1)
    assert one.started_unix_s < one.ended_unix_s < two.started_unix_s
    # The agent ended at its last answer at the latest; what came after was scoring.
    assert trajectory.HasField("closing_agent_s") and trajectory.closing_agent_s == 0
    assert trajectory.state == common_pb2.TRAJECTORY_STATE_SEALED
    assert [(r.name, r.value) for r in trajectory.rewards] == [("solved", 1.0)]


async def test_streamed_answer_equals_the_whole_one(stack: GatewayStack, gateway: Instance) -> None:
    """SSE deltas add up to the text and tool call of an unstreamed call."""
    client = stack.openai(gateway, stack.token("stream:0:0"))
    stream = await client.chat.completions.create(
        model="policy",
        messages=[user(f"SAY[[Grüße, ich schaue.\n{CALL}]]")],
        tools=[LOOK],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Grüße, ich schaue."
    assert len([delta for delta in deltas if delta.content]) > 5
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert call.function is not None
    assert call.function.name == "look"
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 10


async def test_streamed_choices_end_together(stack: GatewayStack, gateway: Instance) -> None:
    """Each of n choices streams to its own end; their usage is sent once, at the end."""
    client = stack.openai(gateway, stack.token("stream-choices:0:0"))
    stream = await client.chat.completions.create(
        model="policy",
        messages=[user("SAY[[same]]")],
        n=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = [chunk async for chunk in stream]
    texts, ends = ["", "", ""], []
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert texts == ["same"] * 3
    assert sorted(ends) == [0, 1, 2]
    assert last.usage is not None
    assert (last.choices, last.usage.completion_tokens % 3) == ([], 0)


async def test_stop_strings_end_the_answer_and_the_record(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """Text ends before the stop string; the record ends with the token that completed it."""
    trajectory_id = "stop:0:0"
    token = stack.token(trajectory_id)
    client = stack.openai(gateway, token)
    answer = await client.chat.completions.create(
        model="policy", messages=[user("SAY[[one STOP two]]")], stop=["STOP"], logprobs=True
    )
    assert answer.choices[0].message.content == "one "
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    sampled = "".join(token.token for token in answer.choices[0].logprobs.content)
    assert sampled == "one STOP"
    async with stack.agent(gateway, token) as agent:
        await agent.close()
    trajectory = await recorded(stack, own_coordinator, trajectory_id)
    assert len(trajectory.turns[0].sampled.ids) == 4 * len("one STOP")
    assert trajectory.turns[0].finish_reason == common_pb2.FINISH_REASON_STOP


async def test_parallel_choices_share_their_prompt(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """n answers are n turns, and only one stores the prompt."""
    trajectory_id = "choices:0:0"
    token = stack.token(trajectory_id)
    client = stack.openai(gateway, token)
    answer = await client.chat.completions.create(
        model="policy", messages=[user("SAY[[same]]")], n=3
    )
    assert [choice.message.content for choice in answer.choices] == ["same"] * 3
    async with stack.agent(gateway, token) as agent:
        assert await agent.close() == 3
    trajectory = await recorded(stack, own_coordinator, trajectory_id)
    check_exact(stack, trajectory)
    assert [bool(turn.prompt_ids) for turn in trajectory.turns] == [True, False, False]


async def test_white_box_agent_folds_and_generates(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """Over gRPC: chat, a fold as an action of its own, ids in and out, annotate, close."""
    trajectory_id = "whitebox:1:0"
    async with stack.agent(gateway, stack.token(trajectory_id)) as agent:
        assert agent.info is not None
        assert (agent.info.trajectory_id, agent.info.turns) == (trajectory_id, 0)
        history = [user("Count. SAY[[1 2 3]]")]
        answer = await agent.chat(history)
        assert answer.text == "1 2 3"
        history += [answer.message, user("Sum up. SAY[[counted to 3]]")]
        pieces = [piece async for piece in agent.stream(history, context_action="fold")]
        folded = pieces[-1]
        assert isinstance(folded, Answer)
        assert "".join(piece for piece in pieces[:-1] if isinstance(piece, str)) == folded.text
        after = await agent.chat([user(f"{folded.text}. Go on. SAY[[4 5]]")])
        assert (after.text, after.turn_index) == ("4 5", 2)
        prompt = stack.sampled(trajectory_id)[0]["prompt_ids"]
        sampled = await agent.generate(prompt, max_tokens=3)
        assert (len(sampled.ids), sampled.finish_reason) == (3, "length")
        await agent.annotate(reward_event("tidy", 0.5, kind="process", turn_index=1))
        assert await agent.close(reward_event("done", 1.0)) == 4
        # Again: nothing changes.
        assert await agent.close(reward_event("done", 1.0)) == 4
        with pytest.raises(FailedPrecondition, match="closed"):
            await agent.chat(history)

    trajectory = await recorded(stack, own_coordinator, trajectory_id)
    check_exact(stack, trajectory)
    assert [turn.context_action for turn in trajectory.turns] == ["", "fold", "", ""]
    assert trajectory.turns[3].prefix_tokens == len(prompt)
    assert {reward.name for reward in trajectory.rewards} == {"tidy", "done"}


async def test_malformed_tool_call_is_text_and_a_process_signal(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """The agent gets the sampled text, and the trajectory has the error."""
    trajectory_id = "malformed:0:0"
    token = stack.token(trajectory_id)
    broken = '<tool_call>{"name": "look", "arguments"}</tool_call>'
    answer = await stack.openai(gateway, token).chat.completions.create(
        model="policy",
        messages=[user(f"SAY[[{broken}]]")],
        tools=[LOOK],
    )
    assert answer.choices[0].message.content == broken
    assert not answer.choices[0].message.tool_calls
    async with stack.agent(gateway, token) as agent:
        await agent.close(reward_event("solved", 0.0))
    trajectory = await recorded(stack, own_coordinator, trajectory_id)
    assert "not JSON" in trajectory.turns[0].parse_error
    signal = next(r for r in trajectory.rewards if r.name == "malformed_tool_call")
    assert (signal.event_id, signal.value, signal.turn_index) == ("parse-0", -1.0, 0)
    assert signal.kind == common_pb2.REWARD_KIND_PROCESS


async def test_disconnect_aborts_the_call_and_records_its_tokens(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """A client that disconnects in mid-answer leaves a turn with the tokens sampled until then."""
    trajectory_id = "hangup:0:0"
    token = stack.token(trajectory_id)
    stream = await stack.openai(gateway, token).chat.completions.create(
        model="policy", messages=[user(f"PACE[[0.1]] SAY[[{'x' * 200}]]")], stream=True
    )
    seen = 0
    async for chunk in stream:
        seen += bool(chunk.choices and chunk.choices[0].delta.content)
        if seen == 3:
            break
    await stream.close()
    async with stack.agent(gateway, token) as agent:
        assert await agent.close() == 1
    (turn,) = (await recorded(stack, own_coordinator, trajectory_id)).turns
    assert turn.finish_reason == common_pb2.FINISH_REASON_ABORTED
    assert 3 <= len(turn.sampled.ids) // 4 < 150


async def test_session_in_the_path_and_close_over_http(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """A program that takes only a base URL is a session too, and its grader closes it."""
    trajectory_id = "path:0:0"
    host = f"http://{gateway.metadata['http']}"
    base = f"{host}/s/{stack.token(trajectory_id)}/v1"
    grader = f"{host}/s/{stack.grader_token(trajectory_id)}/v1"
    ask = {"model": "policy", "messages": [user("SAY[[yes]]")]}
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{base}/chat/completions", json=ask) as got:
            assert (await got.json())["choices"][0]["message"]["content"] == "yes"
        close = {"rewards": [{"name": "done", "value": 1.0}]}
        async with http.post(f"{grader}/forge/close", json=close) as got:
            assert await got.json() == {"turns": 1, "sampled_tokens": 4}
        async with http.post(f"{base}/chat/completions", json=ask) as got:
            assert (got.status, got.headers["x-should-retry"]) == (409, "false")
        async with http.get(f"{base}/nowhere") as got:
            assert (await got.json())["error"]["type"] == "not_found_error"
    trajectory = await recorded(stack, own_coordinator, trajectory_id)
    assert trajectory.state == common_pb2.TRAJECTORY_STATE_SEALED


async def test_required_tool_call_is_forced(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """tool_choice puts the beginning of the call into the prompt, not into the sample."""
    trajectory_id = "forced:0:0"
    token = stack.token(trajectory_id)
    answer = await stack.openai(gateway, token).chat.completions.create(
        model="policy",
        messages=[user('SAY[[{"at": "attic"}}\n</tool_call>]]')],
        tools=[LOOK],
        tool_choice={"type": "function", "function": {"name": "look"}},
    )
    assert answer.choices[0].message.tool_calls is not None
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"at": "attic"}'  # type: ignore[union-attr]
    async with stack.agent(gateway, token) as agent:
        await agent.close()
    check_exact(stack, await recorded(stack, own_coordinator, trajectory_id))


async def test_parallel_sessions_do_not_mix(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """Each has only its own turns."""

    async def converse(number: int) -> str:
        token = stack.token(f"crowd:{number}:0")
        client = stack.openai(gateway, token)
        history: list[Any] = [user(f"SAY[[hello {number}]]")]
        for _ in range(3):
            answer = await client.chat.completions.create(model="policy", messages=history)
            history += [{"role": "assistant", "content": answer.choices[0].message.content}]
            history += [user("and again?")]
        async with stack.agent(gateway, token) as agent:
            await agent.close(min_turns=3)
        return str(history[1]["content"])

    said = await asyncio.gather(*(converse(number) for number in range(16)))
    assert list(said) == [f"hello {number}" for number in range(16)]
    for number in range(16):
        trajectory = await recorded(stack, own_coordinator, f"crowd:{number}:0")
        check_exact(stack, trajectory)
        assert [turn.parent_turn for turn in trajectory.turns] == [-1, 0, 1]
