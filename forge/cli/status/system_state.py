"""The state of a running system: its services, their answers, and the problems with a remedy.

Owns the reading and the JSON form; `forge.cli.status.command` owns the form for people.
"""

from __future__ import annotations

import asyncio
import json
from asyncio import gather
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from grpc_health.v1 import health_pb2, health_pb2_grpc

from forge.cli.clocks import compare_clocks
from forge.cli.json_rows import row_of
from forge.cli.local_run.stack import READY_KINDS
from forge.cli.trouble import troubles
from forge.client.operator import Operator
from forge.client.scheduler import START_KEY, TERM_ERROR_KEY
from forge.client.stored.pool import refusals
from forge.core.errors import ForgeError, Unavailable
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.process.agreement import AGREED_KEY
from forge.runtime.process.clock_watch import REMEDY
from forge.runtime.process.drain import DRAINING_KEY
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.status import translated
from forge.runtime.serving_groups import MARK, is_starting
from forge.runtime.weights import ERROR_KEY, TRAINER_STANDBYS
from forge.v1 import inference_pb2, scheduler_pb2, trainer_pb2

NEEDED: Mapping[str, str] = {
    "scheduler": "no task is accepted, sampled or trained",
    "pool": "no task and no turn is stored",
    "trainer": "complete groups wait",
    "prefill": "agents cannot sample",
    "decode": "agents cannot sample",
    "router": "agents cannot sample",
    "gateway": "agents cannot sample",
    "runner": "queued tasks wait",
}
"""Kinds of services, and the effect of their absence."""
_APART = ("version", AGREED_KEY)
"""Metadata keys that are shown elsewhere, or nowhere."""
_KINDS = (*READY_KINDS, "runner")
_KNOW_S = 15.0
_HEALTH_S = 5.0

Status = TypeVar("Status")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One process."""

    kind: str
    instance: str
    address: str
    """host:port; of a standby trainer its host."""
    role: str
    """"leader" or "standby", of schedulers and trainers."""
    state: str
    """"ready", "standby", "not serving" or "no answer"."""
    version: str
    """Release; empty for releases that announce none."""
    metadata: Mapping[str, str]
    error: str = ""
    """Reason why there was no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemState:
    """The state at one moment; a status that could not be read is the error."""

    cluster: str
    services: list[Service]
    scheduler: scheduler_pb2.GetSchedulerStatusResponse | ForgeError
    inference: inference_pb2.GetInferenceStatusResponse | ForgeError
    trainer: trainer_pb2.GetTrainerStatusResponse | ForgeError
    clock_problems: list[str]

    @property
    def missing(self) -> list[str]:
        """Kinds without an instance; a standby trainer does not train, and workers of the role both
        need no prefill."""
        present = {one.kind for one in self.services if one.state != "standby"}
        if any(
            one.kind == "decode" and one.metadata.get("role") == "both" for one in self.services
        ):
            present.add("prefill")
        return [kind for kind in NEEDED if kind not in present]

    def problems(self) -> Iterator[str]:
        """Each problem, with its remedy."""
        for kind in self.missing:
            yield (
                f"No {kind} is registered: {NEEDED[kind]}. Start one; if its process runs, its log "
                "has the reason."
            )
        for one in self.services:
            if one.state in ("not serving", "no answer"):
                yield (
                    f"{one.kind} {one.instance} at {one.address}: {one.error or one.state}. If it "
                    "neither starts nor stops, read its log."
                )
        for one in self.services:
            yield from _announced(one)
        if isinstance(self.scheduler, scheduler_pb2.GetSchedulerStatusResponse):
            yield from troubles(self.scheduler).values()
        yield from self.clock_problems

    def as_json(self) -> str:
        """Returns one line of JSON."""
        answers = {
            "scheduler": self.scheduler,
            "inference": self.inference,
            "trainer": self.trainer,
        }
        errors = {name: str(one) for name, one in answers.items() if isinstance(one, ForgeError)}
        row: dict[str, Any] = {
            "cluster": self.cluster,
            "services": [asdict(one) for one in self.services],
            "missing": self.missing,
            "problems": list(self.problems()),
            "errors": errors,
        }
        for name, one in answers.items():
            row[name] = None if isinstance(one, ForgeError) else row_of(one)
        return json.dumps(row)


async def read_state(coordinator: Coordinator, channels: Channels, *, cluster: str) -> SystemState:
    """Reads everything at once, without retries, from the services that etcd has: absent ones are
    reported. Raises `Unavailable` without etcd or before etcd has listed them, `Unauthenticated`
    for the key of another cluster."""
    await _know_services(coordinator)
    operator = Operator(coordinator, channels, retry_for_s=0.0, find_s=0.0)
    services, standbys, scheduler, inference, trainer, (_, clocks) = await gather(
        _services(coordinator, channels),
        _standby_trainers(coordinator),
        or_error(operator.scheduler_status(with_tombstones=True)),
        or_error(operator.inference_status()),
        or_error(trainer_status(operator)),
        compare_clocks(coordinator, channels),
    )
    services = without_old_terms(services)
    return SystemState(
        cluster=cluster,
        services=[_with_drain(one, scheduler) for one in services] + standbys,
        scheduler=scheduler,
        inference=inference,
        trainer=trainer,
        clock_problems=[f"{line}: {REMEDY}" for line in clocks.lines()],
    )


def _announced(one: Service) -> Iterator[str]:
    """The problems that a service has in its metadata."""
    for refusal, remedy in refusals(one.metadata):
        yield f"{refusal}. {remedy}"
    if error := one.metadata.get(ERROR_KEY):
        yield (
            f"{one.kind} {one.instance} does not have the newest weights: {error}. It tries each "
            "newer one; if all workers refuse one, use `forge weights rollback`."
        )


def without_old_terms(services: list[Service]) -> list[Service]:
    """The services without failed terms of schedulers once one leads: they explain nothing then."""
    if not any((one.kind, one.role) == ("scheduler", "leader") for one in services):
        return services
    return [
        replace(one, metadata={k: v for k, v in one.metadata.items() if k != TERM_ERROR_KEY})
        for one in services
    ]


def _with_drain(
    one: Service, scheduler: scheduler_pb2.GetSchedulerStatusResponse | ForgeError
) -> Service:
    """The service with the mark of a drain, which the scheduler has for runners."""
    if START_KEY not in one.metadata:
        return one
    metadata = dict(one.metadata)
    start_id = metadata.pop(START_KEY)
    if isinstance(scheduler, scheduler_pb2.GetSchedulerStatusResponse) and any(
        (drained.runner_id, drained.start_id) == (one.instance, start_id)
        for drained in scheduler.draining_runners
    ):
        metadata[DRAINING_KEY] = "1"
    return replace(one, metadata=metadata)


async def trainer_status(operator: Operator) -> trainer_pb2.GetTrainerStatusResponse:
    """Returns the trainer's status without the outcomes per task, which are thousands of lines."""
    status = await operator.trainer_status()
    for domain in status.latest_evaluation.domains.values():
        domain.ClearField("task_outcomes")
    return status


async def or_error(status: Awaitable[Status]) -> Status | ForgeError:
    """Returns the status, or the error of a service that does not answer."""
    try:
        return await status
    except ForgeError as error:
        return error


async def _know_services(coordinator: Coordinator) -> None:
    """Wait for the first view of etcd: before, an absent service cannot be told from a present
    one. Raises `Unavailable`."""
    try:
        async with asyncio.timeout(_KNOW_S):
            await gather(*(coordinator.discover(kind).known() for kind in _KINDS))
    except TimeoutError:
        raise Unavailable(
            f"etcd has not listed the services within {_KNOW_S:g} s: it or this host is "
            "overloaded; repeat the command"
        ) from None


async def _services(coordinator: Coordinator, channels: Channels) -> list[Service]:
    waits = [coordinator.discover(kind).wait(timeout_s=0.0) for kind in _KINDS]
    instances: list[Instance] = []
    for registered in await gather(*waits, return_exceptions=True):
        if isinstance(registered, Unavailable):
            continue
        if isinstance(registered, BaseException):
            raise registered
        instances += registered
    everyone = await coordinator.all_instances()
    instances += sorted(
        (
            one
            for one in everyone
            if one.kind == "console" or (MARK in one.kind and not is_starting(one.kind))
        ),
        key=lambda one: (one.kind, one.instance_id),
    )
    states = await gather(*(_health(channels, one) for one in instances))
    return [
        Service(
            kind=one.kind,
            instance=one.instance_id,
            address=one.address,
            role=_role(one),
            state=state,
            error=error,
            version=one.metadata.get("version", ""),
            metadata={k: v for k, v in sorted(one.metadata.items()) if k not in _APART},
        )
        for one, (state, error) in zip(instances, states, strict=True)
    ]


def _role(instance: Instance) -> str:
    if instance.kind == "scheduler":
        return "leader" if instance.metadata.get("leader") == "true" else "standby"
    return "leader" if instance.kind == "trainer" else ""


async def _health(channels: Channels, instance: Instance) -> tuple[str, str]:
    """Returns the state, and the error of a service that does not answer."""
    try:
        stub: Any = channels.stub(health_pb2_grpc.HealthStub, instance.address)
        async with translated():
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_S)
    except ForgeError as error:
        return "no answer", str(error)
    serves = answer.status == health_pb2.HealthCheckResponse.SERVING
    return "ready" if serves else "not serving", ""


async def _standby_trainers(coordinator: Coordinator) -> list[Service]:
    """Trainers that wait for their election; they serve no calls."""
    entries = [json.loads(value) for value in await coordinator.values(TRAINER_STANDBYS)]
    return [
        Service(
            kind="trainer",
            instance=entry["instance"],
            address=entry["host"],
            role="standby",
            state="standby",
            version=entry["version"],
            metadata={},
        )
        for entry in entries
    ]
