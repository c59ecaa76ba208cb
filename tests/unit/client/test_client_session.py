"""The agent's SDK against a gateway on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from forge.client import AgentSession, Answer, reward_event
from forge.core.errors import ConfigError, FailedPrecondition, InvalidArgument, Unauthenticated
from tests.support.scripted_gateway import ScriptedGateway, calls, replay, text

QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with ScriptedGateway(replay(text("it is 4"))) as running:
        yield running


def environment(gateway: ScriptedGateway) -> dict[str, str]:
    return {
        "FORGE_GRPC_ADDR": f"127.0.0.1:{gateway.grpc_port}",
        "FORGE_SESSION_TOKEN": "token",
    }


def connected(gateway: ScriptedGateway, **options: float) -> AgentSession:
    return AgentSession.connect(f"127.0.0.1:{gateway.grpc_port}", "token", **options)


async def test_a_chat_returns_the_whole_answer(gateway: ScriptedGateway) -> None:
    """The answer carries the message to append and the counts of its turn."""
    async with connected(gateway) as session:
        answer = await session.chat(QUESTION, max_tokens=16)
    assert answer.text == "it is 4"
    assert answer.message == {"role": "assistant", "content": "it is 4"}
    assert (answer.finish_reason, answer.prompt_tokens, answer.turn_index) == ("stop", 7, 0)
    assert gateway.session("token").max_tokens == [16]


async def test_tool_calls_arrive_in_openai_shape(gateway: ScriptedGateway) -> None:
    """A white-box agent reads and sends back tool calls as an OpenAI client does."""
    gateway.script = replay(calls(("add", '{"a": 1}')), text("done"))
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    async with connected(gateway) as session:
        answer = await session.chat(QUESTION, tools=[tool])
        (call,) = answer.tool_calls
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "1"}
        await session.chat([*QUESTION, answer.message, result], tools=[tool])
    sent = gateway.session("token").requests[1]
    assert sent == [*QUESTION, answer.message, result]
    assert gateway.session("token").tools == [[tool], [tool]]


async def test_a_stream_yields_text_then_the_answer(gateway: ScriptedGateway) -> None:
    """Text comes in pieces; the last item is the whole answer."""
    async with connected(gateway) as session:
        pieces = [piece async for piece in session.stream(QUESTION)]
    assert pieces[:-1] == ["it", "is", "4"]
    assert isinstance(pieces[-1], Answer)
    assert pieces[-1].text == "it is 4"


async def test_generate_takes_and_returns_token_ids(gateway: ScriptedGateway) -> None:
    """Ids go in and come out with log-prob and weight version, one entry per token."""
    async with connected(gateway) as session:
        sampled = await session.generate([5, 70_000, 2])
    assert list(sampled.ids) == [5, 70_000, 2]
    assert list(sampled.logprobs) == [-0.5] * 3
    assert list(sampled.weight_versions) == [5] * 3
    assert sampled.finish_reason == "length"


async def test_a_normal_end_seals_the_trajectory(gateway: ScriptedGateway) -> None:
    """Leaving the block closes the session with what was annotated."""
    async with connected(gateway) as session:
        await session.chat(QUESTION)
        await session.annotate(reward_event("solved", 1.0))
    assert gateway.session("token").state == "sealed"
    assert gateway.session("token").reward("solved") == 1.0


async def test_an_exception_abandons_the_trajectory(gateway: ScriptedGateway) -> None:
    """What an agent did not finish is never trained on; the record says why."""
    with pytest.raises(ZeroDivisionError):
        async with connected(gateway):
            raise ZeroDivisionError("by zero")
    session = gateway.session("token")
    assert (session.state, session.reason) == ("abandoned", "ZeroDivisionError: by zero")


async def test_a_session_from_the_environment_is_left_to_its_runner(
    gateway: ScriptedGateway,
) -> None:
    """A program that a runner started neither seals nor abandons: the runner scores it first."""
    async with AgentSession.from_env(environment(gateway)) as session:
        await session.chat(QUESTION)
    assert gateway.session("token").state == "open"


def test_a_missing_variable_is_named() -> None:
    """Started by hand, a program is told which variable it lacks and who sets it."""
    with pytest.raises(ConfigError, match=r"FORGE_SESSION_TOKEN .*forge agents run"):
        AgentSession.from_env({"FORGE_GRPC_ADDR": "127.0.0.1:1"})


async def test_a_busy_gateway_is_asked_again(gateway: ScriptedGateway) -> None:
    """Overload and restarts are waited out, as told by the error tree."""
    gateway.failures += [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls wait"),
        (grpc.StatusCode.UNAVAILABLE, "draining"),
    ]
    async with connected(gateway) as session:
        assert (await session.chat(QUESTION)).text == "it is 4"
    assert len(gateway.session("token").requests) == 1


async def test_a_wrong_token_is_not_tried_again(gateway: ScriptedGateway) -> None:
    """An error that waiting cannot mend comes back at once, as its own type."""
    gateway.failures += [(grpc.StatusCode.UNAUTHENTICATED, "expired")] * 2
    with pytest.raises(Unauthenticated, match="expired"):
        await connected(gateway).open()
    assert len(gateway.failures) == 1


async def test_too_few_recorded_turns_refuse_to_seal(gateway: ScriptedGateway) -> None:
    """Turns that were answered but not recorded must not be sealed away."""
    async with connected(gateway) as session:
        await session.chat(QUESTION)
        with pytest.raises(FailedPrecondition, match="only 1 turns"):
            await session.close(min_turns=2)


async def test_a_content_part_that_is_no_text_is_refused(gateway: ScriptedGateway) -> None:
    """Parts of text are joined; anything else is told by its type."""
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}
    async with connected(gateway) as session:
        with pytest.raises(InvalidArgument, match="image_url"):
            await session.chat([image])
        await session.chat([parts])
    assert gateway.session("token").requests == [[{"role": "user", "content": "ab"}]]
