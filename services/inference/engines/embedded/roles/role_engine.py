"""Common base of the engines of all roles: limits, weights, and the count of requests."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar, Self

from forge.core.errors import DeadlineExceeded, ForgeError, ResourceExhausted
from forge.core.named_tensor import NamedTensor
from forge.runtime.actors.actor import ThreadActor
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.runtime.actors.supervision import Restart
from forge.runtime.concurrency.futures import settle
from forge.runtime.telemetry import log
from services.inference.engines.base import EngineStatus, ModelLimits, Probe
from services.inference.engines.cache_reports.cache_log import CacheLog
from services.inference.engines.embedded.kv.prefix_cache import cache_sizes
from services.inference.engines.embedded.memory_shortage import attempt
from services.inference.engines.embedded.messages import Swap
from services.inference.engines.embedded.model.policy import StagedWeights
from services.inference.engines.embedded.roles.wiring import (
    CAPABILITIES,
    EngineParts,
    build_policy,
    kv_store,
)
from services.inference.engines.embedded.stored_kv import architecture
from services.inference.engines.grammar_masks import Grammars
from services.inference.engines.provider import EngineOptions

NEVER_RESTART = Restart(max_restarts=0)
"""A crash leaves the model in an unknown state: the process ends, its supervisor starts a new
one."""


class Work:
    """Counts unfinished requests."""

    def __init__(self) -> None:
        self.count = 0
        self.none = asyncio.Event()
        self.none.set()

    def add(self, change: int) -> None:
        """Count so many more."""
        self.count += change
        if self.count:
            self.none.clear()
        else:
            self.none.set()


class RoleEngine(ABC):
    """Shared by all roles: start, limits, weights and the count of requests."""

    role: ClassVar[str]
    resumes: ClassVar[bool]
    """Whether its cache has states of recurrent layers, from which later prompts continue."""

    @classmethod
    async def start(cls, actors: ActorSystem, options: EngineOptions) -> Self:
        """Build the model and start the actor."""
        policy = await asyncio.to_thread(build_policy, options)
        store = kv_store(options, policy)
        parts = EngineParts(policy=policy, options=options, store=store, cache_log=CacheLog())
        # The thread of the actor makes the prefix cache.
        make = partial(cls.make_actor, parts)
        return cls(parts, await actors.spawn(make, name=cls.role, restart=NEVER_RESTART))

    @classmethod
    @abstractmethod
    def make_actor(cls, parts: EngineParts) -> ThreadActor:
        """Return the actor of the role."""

    def __init__(self, parts: EngineParts, actor: ActorRef) -> None:
        policy, options = parts.policy, parts.options
        self.limits: ModelLimits = policy.limits
        shape = policy.kv_shape
        self.capabilities = replace(
            CAPABILITIES,
            routed_experts=shape.routes is not None,
            drafts=CAPABILITIES.drafts and shape.states is None,
        )
        self._policy = policy
        self._actor = actor
        self._options = options
        self._store = parts.store
        self.cache_reports = parts.cache_log
        self._grammars = Grammars(options.model_path, vocabulary=policy.limits.vocabulary)
        self._work = Work()
        self._version = 0
        """The weights in service: those on trial are `Policy.version` already."""
        context_bytes = policy.limits.context_tokens * shape.token_bytes + shape.state_bytes
        if context_bytes > options.kv_bytes:
            log.warning(
                "context_exceeds_kv_mib",
                context_tokens=policy.limits.context_tokens,
                needed_mib=-(-context_bytes >> 20),
                kv_mib=options.kv_bytes >> 20,
            )

    @property
    def kv_fingerprint(self) -> bytes:
        """See `EarlyDecodeEngine`."""
        return self._policy.kv_shape.fingerprint

    @property
    def cache_tokens(self) -> int:
        """Capacity of the prefix cache."""
        block_tokens = self._options.block_tokens
        blocks, _ = cache_sizes(
            self._policy.kv_shape,
            block_tokens=block_tokens,
            capacity_bytes=self._options.cache_bytes,
            resumes=self.resumes,
        )
        return blocks * block_tokens

    async def load(
        self, tensors: Mapping[str, NamedTensor], *, version: int, probe: Probe | None = None
    ) -> None:
        """See `Engine`."""
        stage = partial(attempt, partial(self._stage, tensors, version), self._policy.device)
        tried = await asyncio.to_thread(stage)
        staged = tried.result
        if staged is None:
            raise ResourceExhausted(
                f"weights {version}: no memory to stage them: {tried.shortage}", retry_after_s=1.0
            )
        served: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timeout_s = self._options.request_timeout_s

        def deliver(refusal: ForgeError | None) -> None:
            if refusal is None:
                self._version = version
            settle(served, refusal)

        swap = Swap(
            weights=staged,
            deliver=deliver,
            probe=probe,
            kv_identity=staged.identity,
        )
        await self._actor.ask(swap, timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await served
        except TimeoutError:
            raise DeadlineExceeded(
                f"weights {version} were not served within {timeout_s:g} s: prompts that have "
                "begun come first"
            ) from None

    def _stage(self, tensors: Mapping[str, NamedTensor], version: int) -> StagedWeights:
        model = None
        if self._store is not None:
            model = architecture(self._options.model_path, self._policy.kv_shape)
        return self._policy.stage(tensors, version=version, architecture=model)

    def status(self) -> EngineStatus:
        """See `Engine`."""
        return EngineStatus(version=self._version, running=self._work.count)

    async def idle(self) -> None:
        """See `Engine`."""
        await self._work.none.wait()

    async def close(self) -> None:
        """See `Engine`."""
        self._grammars.close()
        await self._actor.stop()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
