"""Attempts of a runner against one scripted gateway, in the process of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from forge.agents.attempts import Attempts, RolloutLimits
from forge.agents.domains import Domains
from forge.agents.gateways import Gateways
from forge.agents.scaffolds import Scaffolds
from forge.agents.scoring.reward_pool import RewardLimits, RewardPool
from forge.runtime.rpc.channel import Channels
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from tests.support.agents.scripted_gateway import Instances, Message, ScriptedGateway, replay, text
from tests.support.agents.tasks import SumDomain


class Bench:
    """Everything around an attempt, with one scripted gateway."""

    def __init__(self, gateway: ScriptedGateway) -> None:
        self.gateway = gateway
        self.channels = Channels(Security(Keyring.from_bytes(b"k" * 32)))
        self.scaffolds = Scaffolds(timeout_s=60.0)

    async def run(
        self,
        claim: Any,
        *,
        rollout_s: float = 60.0,
        reward: str = "",
        domain: Any = None,
        reward_s: float = 60.0,
    ) -> Any:
        """`reward` names a function of `tests.support.agents.reward_functions`."""
        reference = f"tests.support.agents.reward_functions:{reward}"
        rewards = RewardPool(
            {claim.task.domain: reference} if reward else {},
            limits=RewardLimits(call_s=reward_s, memory_bytes=0, processes=0),
            workers=1,
        )
        attempt = Attempts(
            gateways=Gateways(
                Instances(self.gateway.instance),  # type: ignore[arg-type]
                self.channels,
                wait_s=5.0,
            ),
            scaffolds=self.scaffolds,
            domain=Domains({"sums": domain or SumDomain()}, rewarded=rewards.domains).get,
            rewards=rewards,
            limits=RolloutLimits(rollout_s=rollout_s, max_tokens=32),
        )
        try:
            return await attempt.run(claim)
        finally:
            await rewards.close()

    async def stopped(self, claim: Any) -> asyncio.Task[Any]:
        """A run that is cancelled during its first model call, at its end."""
        began = asyncio.Event()

        async def hang(token: str, messages: list[Message]) -> Message:
            began.set()
            await asyncio.Event().wait()
            return text("never")

        self.gateway.script = hang
        running = asyncio.create_task(self.run(claim))
        await began.wait()
        running.cancel()
        await asyncio.wait([running])
        return running

    def session(self, number: int = 0) -> Any:
        return self.gateway.session(f"token-{number}")


@asynccontextmanager
async def started_bench() -> AsyncIterator[Bench]:
    """A gateway that answers "4", until the test gives it another script."""
    async with ScriptedGateway(replay(text("4"))) as gateway:
        made = Bench(gateway)
        yield made
        await made.scaffolds.close()
        await made.channels.close()
