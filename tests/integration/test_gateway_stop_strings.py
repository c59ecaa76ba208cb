"""Stop strings whose characters are several tokens, with several answers, log-probs and tool calls,
whole and streamed, by the SDKs of both protocols."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forge.runtime.coordination import Instance
from tests.support.gateway.stack import GatewayStack

TEXT = "naïve 日本 \ufffd😀 café "
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at":"é😀"}}\n</tool_call>'
TOKENS = 200


def said(text: str) -> Any:
    return [{"role": "user", "content": f"SAY[[{text}]] PACE[[0]]"}]


async def choices_of(client: Any, *, stream: bool, **ask: Any) -> list[dict[str, Any]]:
    """Text, calls, log-probs and end of each choice, from one object or from the chunks."""
    answer = await client.chat.completions.create(model="policy", stream=stream, **ask)
    chunks = [chunk async for chunk in answer] if stream else [answer]
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        part = choice.delta if stream else choice.message
        one = found.setdefault(choice.index, {"text": "", "calls": [], "bytes": b"", "end": None})
        one["text"] += part.content or ""
        one["calls"] += [call.function.arguments for call in part.tool_calls or ()]
        one["end"] = choice.finish_reason or one["end"]
        if choice.logprobs is not None:
            one["bytes"] += bytes(n for token in choice.logprobs.content for n in token.bytes)
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_answers_end_before_a_stop_string_of_several_tokens(
    stack: GatewayStack, gateway: Instance, stream: bool
) -> None:
    """Each of n answers; the log-probs have the bytes up to the token that completes it."""
    client = stack.openai(gateway, stack.token(f"stop-chars-{stream}:0:0"))
    ask: dict[str, Any] = {"messages": said(f"{TEXT}日本語 tail"), "n": 2, "logprobs": True}
    # Both begin earlier in the text, and neither is whole there.
    stop = ["日本語", "fé!"]
    answers = await choices_of(client, stream=stream, stop=stop, max_tokens=TOKENS, **ask)
    expected = {"text": TEXT, "calls": [], "bytes": f"{TEXT}日本語".encode(), "end": "stop"}
    assert answers == [expected] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_calls_before_a_stop_string_are_whole(
    stack: GatewayStack, gateway: Instance, stream: bool
) -> None:
    """The stop string ends the text behind them."""
    client = stack.openai(gateway, stack.token(f"stop-calls-{stream}:0:0"))
    text = f"so {CALL}{CALL} 日本 tail"
    ask: dict[str, Any] = {"messages": said(text), "tools": [LOOK], "stop": "日本", "n": 2}
    for one in await choices_of(client, stream=stream, max_tokens=TOKENS + 200, **ask):
        assert [json.loads(call) for call in one["calls"]] == [{"at": "é😀"}] * 2
        assert (one["text"].strip(), one["end"]) == ("so", "tool_calls")


async def test_anthropic_names_a_stop_sequence_of_several_tokens(
    stack: GatewayStack, gateway: Instance
) -> None:
    """Whole, and in a stream behind a tool call."""
    client = stack.anthropic(gateway, stack.token("stop-sequences:0:0"))
    ask: dict[str, Any] = {"model": "policy", "max_tokens": TOKENS + 200}
    ask |= {"stop_sequences": ["never", "日本語"]}
    whole = await client.messages.create(messages=said(f"{TEXT}日本語 tail"), **ask)
    assert [block.to_dict() for block in whole.content] == [{"type": "text", "text": TEXT}]
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "日本語")
    tool: Any = {"name": "look", "input_schema": PARAMETERS}
    text = f"so {CALL}日本語 tail"
    async with client.messages.stream(messages=said(text), tools=[tool], **ask) as stream:
        last = await stream.get_final_message()
    first, call = last.content
    assert first.type == "text" and first.text.strip() == "so"
    assert call.type == "tool_use" and call.input == {"at": "é😀"}
    assert (last.stop_reason, last.stop_sequence) == ("stop_sequence", "日本語")
