"""Wiring of a runner process."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from forge.agents.attempts import Attempts, RolloutLimits
from forge.agents.command_setup import make_command
from forge.agents.config import RunnerConfig
from forge.agents.domains import Domains
from forge.agents.environments.base import Domain
from forge.agents.gateways import Gateways
from forge.agents.plugins import load_attribute, named_references
from forge.agents.runner import CALL_S, Runner
from forge.agents.sandbox.control_groups import CONTROL_GROUPS
from forge.agents.sandbox.process_sandbox import ProcessSandbox
from forge.agents.sandbox.program_sandbox import SANDBOX
from forge.agents.scaffolds import Scaffolds
from forge.agents.scoring.reward_pool import RewardLimits, RewardPool
from forge.agents.token_renewal import TokenRenewal
from forge.client.scheduler import START_KEY, SyncScheduler, leads, scheduler_remote
from forge.core.errors import ConfigError, FailedPrecondition
from forge.core.extras import place_of
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.process.service import ServiceContext
from forge.runtime.telemetry import log
from forge.v1 import scheduler_pb2

_OF_DOMAINS = ("name", "scaffold", "max_turns", "generate", "episode")
"""Attributes of a `Domain`."""

ABANDON_SHARE = 0.3
"""Share of the drain time that is reserved to stop the rollouts that did not end."""


class RunnerApp:
    """A runner process. Its only RPCs are health checks."""

    kind = "runner"

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._config: RunnerConfig = context.config
        self._start_id = secrets.token_hex(8)
        self._scaffolds = _make_scaffolds(self._config)
        self._rewards = _make_rewards(self._config)
        self._domains = _make_domains(self._config, self._rewards.domains)
        self._scheduler = scheduler_remote(context.coordinator, context.channels)
        self._sync_scheduler = SyncScheduler(context.coordinator, context.security)
        self._runner = Runner(
            identity=self._identity,
            scheduler=self._ask_scheduler,
            renew=self._renew_leases,
            attempt=self._make_attempts().run,
            concurrency=self._config.concurrency,
            lease_wait_s=self._config.lease_wait_s,
            patience_s=self._config.rollout_timeout_s,
        )
        self._running: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    async def start(self) -> None:
        """Checks the sandbox and the reward functions; leases rollouts from the registration on."""
        _adopt_control_groups()
        SANDBOX.unsafe = self._config.unsafe_sandbox
        if problem := await SANDBOX.problem():
            log.warning("unsafe_sandbox" if SANDBOX.unsafe else "no_sandbox", reason=problem)
        try:
            await self._rewards.check()
            await self._scaffolds.check()
        except BaseException:
            # `stop` is not called after a failed start.
            await self._rewards.close()
            await self._scaffolds.close()
            raise
        self._context.metadata[START_KEY] = self._start_id
        self._running = asyncio.create_task(self._run())
        self._running.add_done_callback(self._ended)
        self._context.keep_running(self._follow_leader(), name="leadership")
        if (bearer := self._context.security.bearer) is not None:
            renewal = TokenRenewal(bearer, self._ask_scheduler)
            self._context.keep_running(renewal.run(), name="token renewal")

    async def drain(self) -> None:
        """Waits until running rollouts have ended."""
        assert self._running is not None
        if not self._context.registered.is_set():
            await cancel_and_wait(self._running)
            return
        await self._runner.drain(patience_s=self._config.drain_s * (1 - ABANDON_SHARE))
        await asyncio.wait([self._running])

    async def stop(self) -> None:
        """Frees all resources; raises the runner's error if it has failed."""
        await cancel_and_wait(self._running)
        self._sync_scheduler.close()
        await self._scaffolds.close()
        await self._rewards.close()
        if self._failure is not None:
            raise self._failure

    async def _run(self) -> None:
        # Before, an operator could not drain it, and its settings may contradict those of others.
        await self._context.registered.wait()
        await self._runner.run()

    def _identity(self) -> scheduler_pb2.LeaseRolloutsRequest:
        return scheduler_pb2.LeaseRolloutsRequest(
            runner_id=self._config.instance_id,
            domains=sorted(self._domains.names),
            scaffolds=sorted(self._scaffolds.names),
            start_id=self._start_id,
        )

    def _ended(self, running: asyncio.Task[None]) -> None:
        if running.cancelled() or (failure := running.exception()) is None:
            return
        if isinstance(failure, BaseExceptionGroup):
            # The first task of the runner to fail has cancelled the others.
            failure = failure.exceptions[0]
        self._failure = failure
        log.error("runner_failed", error=repr(failure))
        self._context.stop()

    async def _follow_leader(self) -> None:
        """Renews all task leases as soon as a new leader is elected."""
        schedulers = self._context.coordinator.discover("scheduler")
        earlier_leaders: set[str] = set()
        while True:
            changed = schedulers.changed()
            leaders = {each.instance_id for each in schedulers.instances if leads(each)}
            if leaders - earlier_leaders:
                self._runner.renew_now()
            earlier_leaders = leaders
            await changed

    async def _ask_scheduler(self, method: str, request: Any, *, timeout_s: float) -> Any:
        return await self._scheduler.call(method, request, timeout_s=timeout_s, where=leads)

    def _renew_leases(self, lease_ids: Sequence[str]) -> Sequence[str]:
        """Called on the thread of `LeaseRenewal`."""
        request = scheduler_pb2.RenewRolloutsRequest(
            lease_ids=lease_ids, runner_id=self._config.instance_id
        )
        response = self._sync_scheduler.call("RenewRollouts", request, timeout_s=CALL_S)
        lost: Sequence[str] = response.lost
        return lost

    def _make_attempts(self) -> Attempts:
        config, context = self._config, self._context
        return Attempts(
            gateways=Gateways(
                context.coordinator.discover("gateway"),
                context.channels,
                wait_s=config.gateway_wait_s,
                scheme="https" if config.tls_cert else "http",
            ),
            scaffolds=self._scaffolds,
            domain=self._domains.get,
            rewards=self._rewards,
            limits=RolloutLimits(rollout_s=config.rollout_timeout_s, max_tokens=config.max_tokens),
        )


def _adopt_control_groups() -> None:
    try:
        CONTROL_GROUPS.adopt()
    except FailedPrecondition as error:
        log.info("no_control_groups", reason=str(error))


def _make_scaffolds(config: RunnerConfig) -> Scaffolds:
    return Scaffolds(
        timeout_s=config.call_timeout_s,
        tls_ca=config.tls_ca,
        extra=named_references("scaffolds", config.scaffolds),
        override=make_command(config) if config.command else None,
    )


def _make_rewards(config: RunnerConfig) -> RewardPool:
    return RewardPool(
        named_references("reward_functions", config.reward_functions),
        limits=RewardLimits(
            call_s=config.reward_timeout_s,
            memory_bytes=config.reward_memory_mb << 20,
            processes=config.reward_processes,
        ),
        workers=config.reward_workers,
        pass_environment=config.pass_environment,
        sandbox=ProcessSandbox(
            modules=[
                entry.partition("=")[2].partition(":")[0] for entry in config.reward_functions
            ],
            read=config.reward_read,
            secrets=config.secret_files,
            network=config.reward_network,
            tmp_bytes=config.reward_tmp_mb << 20,
        ),
        unsafe=config.unsafe_sandbox,
    )


def _make_domains(config: RunnerConfig, rewarded: frozenset[str]) -> Domains:
    domains = named_references("domains", config.domains)
    return Domains(
        {name: _make_domain(reference) for name, reference in domains.items()}, rewarded=rewarded
    )


def _make_domain(reference: str) -> Domain:
    kind = load_attribute(reference)
    try:
        domain: Domain = kind()
    # The class is the user's.
    except Exception as error:
        text = f"{reference}: {type(error).__name__}: {error}{place_of(error)}"
        raise ConfigError(text) from error
    absent = [name for name in _OF_DOMAINS if not hasattr(domain, name)]
    if absent:
        raise ConfigError(
            f"{reference} is no domain, it has no {', '.join(absent)}: see "
            "forge.agents.environments.base.Domain"
        )
    return domain


def plugin_checks(config: RunnerConfig) -> Iterator[Callable[[], object]]:
    """Checks of the command, scaffolds, domains and reward functions, each without the others."""
    yield lambda: _make_scaffolds(config)
    for entry in config.domains:
        yield partial(_load_named, "domains", entry, _make_domain)
    yield lambda: asyncio.run(_check_rewards(config))
    for entry in config.scaffolds:
        yield partial(_load_named, "scaffolds", entry, load_attribute)


def _load_named(setting: str, entry: str, load: Callable[[str], object]) -> None:
    for reference in named_references(setting, [entry]).values():
        load(reference)


async def _check_rewards(config: RunnerConfig) -> None:
    rewards = _make_rewards(config)
    try:
        await rewards.check()
    finally:
        await rewards.close()
