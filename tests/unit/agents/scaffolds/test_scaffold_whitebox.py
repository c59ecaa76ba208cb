"""The white-box scaffold: a tool loop over gRPC that folds its own history."""

from __future__ import annotations

from typing import Any

import pytest

from forge.agents.scaffolds.whitebox import WhiteBox
from forge.core.errors import InvalidArgument
from tests.support.agents.scripted_gateway import Message, ScriptedGateway, calls, replay, text
from tests.support.agents.tasks import SumEpisode, rollout

ADD = calls(("add", '{"a": 1, "b": 3}'))


async def test_white_box_folds_its_history_and_continues_from_the_summary() -> None:
    """The fold is a call under its own name; later turns see only the task and the summary."""
    script = replay(ADD, ADD, text("so far: 4"), ADD, text("4"))
    async with ScriptedGateway(script) as gateway:
        attempt = rollout(gateway, fold_every=2, fold_prompt="Summarize.")
        transcript = await WhiteBox(timeout_s=60.0).run(attempt, SumEpisode(4))
    session = gateway.session("token")
    assert session.context_actions == ["", "", "fold", "", ""]
    assert session.requests[2][-1] == {"role": "user", "content": "Summarize."}
    assert session.requests[3] == [
        *session.requests[0],
        {"role": "user", "content": "Summary: so far: 4"},
    ]
    assert len(session.requests[4]) == len(session.requests[3]) + 2
    assert (transcript.answer, transcript.turns, transcript.tool_calls) == ("4", 5, 3)
    assert [m["content"] for m in transcript.messages if m["role"] == "user"][1:] == ["Summarize."]


async def test_fold_extends_the_history() -> None:
    """With its tools, so that the prefix cache serves it."""
    async with ScriptedGateway(replay(ADD, text("4"), text("4"))) as gateway:
        attempt = rollout(gateway, fold_every=1, fold_prompt="Summarize.")
        await WhiteBox(timeout_s=60.0).run(attempt, SumEpisode(4))
    session = gateway.session("token")
    assert session.requests[1][:2] == session.requests[0]
    assert session.tools[1] == session.tools[0]


async def test_white_box_without_fold_every_is_a_tool_loop() -> None:
    """Without fold_every it is the plain tool loop."""
    async with ScriptedGateway(replay(ADD, ADD, ADD, text("4"))) as gateway:
        transcript = await WhiteBox(timeout_s=60.0).run(rollout(gateway), SumEpisode(4))
    assert gateway.session("token").context_actions == [""] * 4
    assert transcript.turns == 4


async def test_folds_do_not_count_as_turns() -> None:
    """The turn limit counts acting turns; no fold follows the last turn."""
    async with ScriptedGateway(replay(ADD)) as gateway:
        attempt = rollout(gateway, max_turns=2, fold_every=1, fold_prompt="Summarize.")
        await WhiteBox(timeout_s=60.0).run(attempt, SumEpisode(4))
    assert gateway.session("token").context_actions == ["", "fold", ""]


@pytest.mark.parametrize(
    "payload",
    [{"fold_every": 2}, {"fold_prompt": "Summarize."}, {"fold_every": "2", "fold_prompt": "S"}],
)
async def test_fold_every_without_fold_prompt_is_refused(payload: dict[str, Any]) -> None:
    """Both or none; the error names them."""
    async with ScriptedGateway(replay(text("4"))) as gateway:
        with pytest.raises(InvalidArgument, match="fold_every"):
            await WhiteBox(timeout_s=60.0).run(rollout(gateway, **payload), SumEpisode(4))


async def test_history_beyond_the_context_ends_a_white_box_rollout() -> None:
    """Scored like a black box, unless the first call is refused."""

    async def script(token: str, messages: list[Message]) -> Message:
        if len(messages) > 3:
            raise InvalidArgument("600 tokens do not fit into 512")
        return ADD

    async with ScriptedGateway(script) as gateway:
        transcript = await WhiteBox(timeout_s=60.0).run(rollout(gateway), SumEpisode(4))
    assert transcript.turns == 1
