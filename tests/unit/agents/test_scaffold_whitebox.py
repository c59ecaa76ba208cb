"""The white-box scaffold: a tool loop over gRPC that folds its own history."""

from __future__ import annotations

import pytest

from forge.agents.scaffolds.whitebox import WhiteBox
from forge.core.errors import InvalidArgument
from tests.support.agents.scripted_gateway import Message, ScriptedGateway, calls, replay, text
from tests.support.agents.tasks import SumEpisode, rollout

ADD = calls(("add", '{"a": 1, "b": 3}'))


async def test_it_folds_after_so_many_turns_and_goes_on_from_the_summary() -> None:
    """The fold is a call under its own name; what follows sees the task and the summary only."""
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


async def test_the_fold_keeps_the_prefix() -> None:
    """The request to summarise extends the history, tools included, so that its cache serves."""
    async with ScriptedGateway(replay(ADD, text("4"), text("4"))) as gateway:
        attempt = rollout(gateway, fold_every=1, fold_prompt="Summarize.")
        await WhiteBox(timeout_s=60.0).run(attempt, SumEpisode(4))
    session = gateway.session("token")
    assert session.requests[1][:2] == session.requests[0]
    assert session.tools[1] == session.tools[0]


async def test_it_never_folds_unless_asked() -> None:
    """Without fold_every it is the plain tool loop."""
    async with ScriptedGateway(replay(ADD, ADD, ADD, text("4"))) as gateway:
        transcript = await WhiteBox(timeout_s=60.0).run(rollout(gateway), SumEpisode(4))
    assert gateway.session("token").context_actions == [""] * 4
    assert transcript.turns == 4


async def test_folds_do_not_count_as_turns() -> None:
    """The turn limit is about acting; the last turn is not followed by a fold."""
    async with ScriptedGateway(replay(ADD)) as gateway:
        attempt = rollout(gateway, max_turns=2, fold_every=1, fold_prompt="Summarize.")
        await WhiteBox(timeout_s=60.0).run(attempt, SumEpisode(4))
    assert gateway.session("token").context_actions == ["", "fold", ""]


@pytest.mark.parametrize(
    "payload",
    [{"fold_every": 2}, {"fold_prompt": "Summarize."}, {"fold_every": "2", "fold_prompt": "S"}],
)
async def test_half_a_fold_is_refused(payload: dict[str, object]) -> None:
    """fold_every and fold_prompt go together; the error names them."""
    async with ScriptedGateway(replay(text("4"))) as gateway:
        with pytest.raises(InvalidArgument, match="fold_every"):
            await WhiteBox(timeout_s=60.0).run(rollout(gateway, **payload), SumEpisode(4))


async def test_a_history_that_outgrew_the_model_ends_a_white_box_rollout() -> None:
    """As with the black box: scored as it is, unless the very first call is refused."""

    async def script(token: str, messages: list[Message]) -> Message:
        if len(messages) > 3:
            raise InvalidArgument("600 tokens do not fit into 512")
        return ADD

    async with ScriptedGateway(script) as gateway:
        transcript = await WhiteBox(timeout_s=60.0).run(rollout(gateway), SumEpisode(4))
    assert transcript.turns == 1
