"""The black-box scaffold: an OpenAI client and nothing else, against a scripted gateway."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import trustme

from forge.agents.scaffolds.blackbox import BlackBox
from forge.core.errors import InvalidArgument, Unavailable
from tests.support.agents.scripted_gateway import Message, ScriptedGateway, calls, replay, text
from tests.support.agents.tasks import ADD_TOOL, SumEpisode, rollout


@pytest_asyncio.fixture
async def scaffold() -> AsyncIterator[BlackBox]:
    running = BlackBox(timeout_s=60.0)
    yield running
    await running.close()


async def test_black_box_calls_tools_until_the_model_answers(scaffold: BlackBox) -> None:
    """Each answer and each tool result is sent in order, under the session's token."""
    script = replay(calls(("add", '{"a": 1, "b": 3}')), text("4"))
    async with ScriptedGateway(script) as gateway:
        transcript = await scaffold.run(rollout(gateway), SumEpisode(4))
    first, second = gateway.session("token").requests
    assert [message["role"] for message in first] == ["system", "user"]
    assert [message["role"] for message in second] == ["system", "user", "assistant", "tool"]
    assert second[3]["content"] == "4"
    assert gateway.session("token").tools[0] == [ADD_TOOL]
    assert (transcript.answer, transcript.turns, transcript.tool_calls) == ("4", 2, 1)
    assert [message["role"] for message in transcript.messages][2:] == [
        "assistant",
        "tool",
        "assistant",
    ]


async def test_parallel_calls_run_at_the_same_time(scaffold: BlackBox) -> None:
    """Two calls of one answer that wait for each other both end."""
    script = replay(calls(("meet", "{}"), ("meet", "{}")), text("4"))
    async with ScriptedGateway(script) as gateway:
        transcript = await scaffold.run(rollout(gateway), SumEpisode(4))
    assert [m["content"] for m in transcript.messages if m["role"] == "tool"] == ["met", "met"]


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("add", '{"a": 1,', "arguments are not JSON"),
        ("add", "[1]", "arguments must be a JSON object"),
        ("subtract", "{}", "unknown tool subtract"),
    ],
)
async def test_failed_tool_call_is_returned_as_text(
    scaffold: BlackBox, name: str, arguments: str, said: str
) -> None:
    """The model gets the error and may try again; the turn is recorded as failed."""
    async with ScriptedGateway(replay(calls((name, arguments)), text("4"))) as gateway:
        transcript = await scaffold.run(rollout(gateway), SumEpisode(4))
    (result,) = [m["content"] for m in transcript.messages if m["role"] == "tool"]
    assert result.startswith(f"error: {said}")
    assert transcript.failed_calls == (0,)


async def test_black_box_stops_at_the_turn_limit(scaffold: BlackBox) -> None:
    """After the tools of its last turn."""
    script = replay(calls(("add", '{"a": 1, "b": 3}')))
    async with ScriptedGateway(script) as gateway:
        transcript = await scaffold.run(rollout(gateway, max_turns=3), SumEpisode(4))
    assert (transcript.turns, transcript.tool_calls) == (3, 3)


async def test_history_beyond_the_context_ends_the_rollout(scaffold: BlackBox) -> None:
    """Its work so far is scored: a longer attempt is not a broken one."""

    async def script(token: str, messages: list[Message]) -> Message:
        if len(messages) > 3:
            raise InvalidArgument("600 tokens do not fit into 512")
        return calls(("add", '{"a": 1, "b": 3}'))

    async with ScriptedGateway(script) as gateway:
        transcript = await scaffold.run(rollout(gateway), SumEpisode(4))
    assert (transcript.turns, transcript.answer) == (1, "")


async def test_refused_first_call_is_a_permanent_failure(scaffold: BlackBox) -> None:
    """It would be refused again."""

    async def script(token: str, messages: list[Message]) -> Message:
        raise InvalidArgument("600 tokens do not fit into 512")

    async with ScriptedGateway(script) as gateway:
        with pytest.raises(InvalidArgument, match="do not fit"):
            await scaffold.run(rollout(gateway), SumEpisode(4))


async def test_lost_gateway_is_unavailable(scaffold: BlackBox) -> None:
    """This failure has its own error, because another gateway can serve the retry."""
    async with ScriptedGateway(replay(text("4"))) as gateway:
        gone = rollout(gateway)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
        await scaffold.run(gone, SumEpisode(4))


async def test_gateway_certificate_is_verified_by_the_clusters_authority(tmp_path: Path) -> None:
    """HTTPS works with certificates that no public authority has signed."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    trusting = BlackBox(timeout_s=60.0, tls_ca=str(tmp_path / "ca.pem"))
    async with ScriptedGateway(replay(text("4")), tls=tls) as gateway:
        url = f"https://127.0.0.1:{gateway.http_port}"
        attempt = rollout(gateway)
        attempt = replace(attempt, gateway=replace(attempt.gateway, http_url=url))
        transcript = await trusting.run(attempt, SumEpisode(4))
    await trusting.close()
    assert transcript.answer == "4"


async def test_model_name_is_looked_up_once(scaffold: BlackBox) -> None:
    """Per gateway, not per rollout."""
    async with ScriptedGateway(replay(text("4"))) as gateway:
        await scaffold.run(rollout(gateway, token="a"), SumEpisode(4))
        await scaffold.run(rollout(gateway, token="b"), SumEpisode(4))
    assert len(scaffold._models) == 1
