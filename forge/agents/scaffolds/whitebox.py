"""A white-box agent, which manages its own context over gRPC.

Owns the loop with folds: the model writes a summary, which replaces the history. A fold is a turn,
recorded with its context action and trained. `forge.agents.environments.folding` has its messages.
"""

from __future__ import annotations

from forge.agents.conversation import RolloutConversation
from forge.agents.environments.base import Episode, Transcript
from forge.agents.environments.folding import CONTEXT_ACTION, fold_request, folded
from forge.agents.rollout import Rollout
from forge.client.sessions.session import AgentSession
from forge.client.sessions.turns import Answer
from forge.core.errors import InvalidArgument

RETRY_S = 10.0
"""Time for which calls to an unreachable gateway are retried."""


class WhiteBox:
    """The tool loop of the black box, with context folding.

    Payload keys: `fold_every`, turns between folds (0, the default, never folds), and
    `fold_prompt`, the request for a summary.
    """

    def __init__(self, *, timeout_s: float, tls_ca: str = "") -> None:
        """`tls_ca` has no use: the runner's channels have it."""
        self._timeout_s = timeout_s

    async def run(self, rollout: Rollout, episode: Episode) -> Transcript:
        """Runs one attempt through the gateway's session API; returns its transcript."""
        session = AgentSession(
            rollout.gateway.channel,
            rollout.session_token,
            timeout_s=self._timeout_s,
            retry_for_s=RETRY_S,
            stub=rollout.gateway.stub,
        )
        return await _Loop(session, rollout, episode).run()

    async def close(self) -> None:
        """Nothing to free: the channels belong to the runner."""


class _Loop:
    """The loop of one rollout."""

    def __init__(self, session: AgentSession, rollout: Rollout, episode: Episode) -> None:
        self._session = session
        self._rollout = rollout
        self._tools = episode.tools
        self._initial = list(episode.messages)
        self._conversation = RolloutConversation(episode)
        self._fold_every, self._fold_prompt = _fold_settings(rollout)

    async def run(self) -> Transcript:
        try:
            await self._turns()
        except InvalidArgument:
            if self._conversation.calls == 0:
                raise
            # The history exceeds the context of the model: a regular end of the attempt.
        return self._conversation.transcript()

    async def _turns(self) -> None:
        last = self._rollout.max_turns
        for turn in range(1, last + 1):
            answer = await self._ask()
            if not await self._conversation.answered(answer.message):
                return
            if self._fold_every and turn % self._fold_every == 0 and turn < last:
                await self._fold()

    async def _fold(self) -> None:
        conversation = self._conversation
        request = fold_request(conversation.context, self._fold_prompt)
        conversation.add(request[-1])
        summary = await self._ask(context_action=CONTEXT_ACTION)
        conversation.fold(summary.message, folded(self._initial, summary.text))

    async def _ask(self, *, context_action: str = "") -> Answer:
        return await self._session.chat(
            self._conversation.context,
            tools=self._tools,
            max_tokens=self._rollout.max_tokens,
            temperature=self._rollout.temperature,
            context_action=context_action,
        )


def _fold_settings(rollout: Rollout) -> tuple[int, str]:
    every, prompt = rollout.payload.get("fold_every", 0), rollout.payload.get("fold_prompt", "")
    if not isinstance(every, int) or every < 0:
        raise InvalidArgument(f"payload 'fold_every' must be a whole number, is {every!r}")
    if not isinstance(prompt, str) or bool(every) != bool(prompt):
        raise InvalidArgument("payload 'fold_every' and 'fold_prompt' must be set together")
    return every, prompt
