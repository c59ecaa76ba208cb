"""Actions of operators in the console: the hold of the weights, the queue, drains of instances.

Each action is a POST with a JSON object, and one line in the audit log with the person, also when
it was refused or failed. The other service's own audit log has the call of this console. Not here:
who may act (`access`), and the effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from google.protobuf.message import Message

from forge.client.operator import Operator
from forge.client.weights import WeightSteering
from forge.core.errors import ForgeError, InvalidArgument, NotFound
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.status import translated
from forge.runtime.security.audit import write_audit
from forge.runtime.security.tokens import Claims
from forge.runtime.serving_groups import role_of
from forge.v1 import drain_pb2, drain_pb2_grpc, scheduler_pb2, trainer_pb2
from services.console.http.access import DRAIN, QUEUE_CHANGES, WEIGHTS, AccessRules, Right

DRAIN_S = 10.0
DRAINED_KINDS = ("prefill", "decode")
"""Kinds of instances that serve DrainService, of the policy and of serving groups."""
_ACTIVITIES = {
    "running": scheduler_pb2.ACTIVITY_RUNNING,
    "paused": scheduler_pb2.ACTIVITY_PAUSED,
    "draining": scheduler_pb2.ACTIVITY_DRAINING,
}


class Rollback(msgspec.Struct, forbid_unknown_fields=True):
    """Hold one version."""

    weight_version: Annotated[int, msgspec.Meta(ge=1)]


class CanaryRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Serve a version by a share of the workers."""

    weight_version: Annotated[int, msgspec.Meta(ge=1)]
    share: Annotated[float, msgspec.Meta(gt=0, lt=1)]


class Promotion(msgspec.Struct, forbid_unknown_fields=True):
    """End the hold."""


class QueueActivity(msgspec.Struct, forbid_unknown_fields=True):
    """Pause, drain or resume the queue."""

    activity: str


class Drain(msgspec.Struct, forbid_unknown_fields=True):
    """Take a worker out of service, or back."""

    kind: str
    instance: str
    draining: bool


class RunnerDrain(msgspec.Struct, forbid_unknown_fields=True):
    """Lease no further rollout to a runner, or lease again."""

    instance: str
    draining: bool


Body = TypeVar("Body", Rollback, CanaryRequest, Promotion, QueueActivity, Drain, RunnerDrain)
Perform = Callable[[Body, str], tuple[Message, Awaitable[Any]]]
"""Takes the body and the person; returns the message for the audit log, and the call."""
Reply = Callable[[web.Request, Any], Awaitable[web.Response]]


@dataclass(eq=False, slots=True)
class Actions:
    """The changes that this console can make."""

    operator: Operator
    steering: WeightSteering
    coordinator: Coordinator
    channels: Channels
    _: KW_ONLY
    timeout_s: float
    """Deadline of an action; a rollback writes a version to the trainer's disk."""

    def add_to(self, app: web.Application, access: AccessRules, reply: Reply) -> None:
        """Add the routes."""

        def add(path: str, right: Right, kind: type[Body], perform: Perform[Body]) -> None:
            async def handle(request: web.Request) -> web.StreamResponse:
                person = access.actor(request, right)
                body = await _body_of(request, kind)
                message, call = perform(body, person.subject)
                await self._audited(request, person, message, call)
                return await reply(request, {})

            app.router.add_post(path, handle)

        add("/api/weights/rollback", WEIGHTS, Rollback, self._roll_back)
        add("/api/weights/canary", WEIGHTS, CanaryRequest, self._start_canary)
        add("/api/weights/promote", WEIGHTS, Promotion, self._promote)
        add("/api/queue/activity", QUEUE_CHANGES, QueueActivity, self._set_activity)
        add("/api/services/drain", DRAIN, Drain, self._drain)
        add("/api/runners/drain", QUEUE_CHANGES, RunnerDrain, self._drain_runner)

    async def _audited(
        self, request: web.Request, person: Claims, message: Message, call: Awaitable[Any]
    ) -> None:
        code, reason = "OK", None
        try:
            async with asyncio.timeout(self.timeout_s):
                await call
        except TimeoutError:
            code = "DEADLINE_EXCEEDED"
            raise
        except ForgeError as error:
            code, reason = error.code, error
            raise
        finally:
            write_audit(
                f"POST {request.path}",
                person,
                peer=request.remote or "",
                code=code,
                error=reason,
                request=message,
            )

    def _roll_back(self, body: Rollback, person: str) -> tuple[Message, Awaitable[Any]]:
        version = body.weight_version
        message = trainer_pb2.RollBackWeightsRequest(weight_version=version)
        return message, self.steering.roll_back(version, on_behalf_of=person)

    def _start_canary(self, body: CanaryRequest, person: str) -> tuple[Message, Awaitable[Any]]:
        version, share = body.weight_version, body.share
        message = trainer_pb2.StartWeightCanaryRequest(weight_version=version, share=share)
        call = self.steering.start_canary(version, share=share, on_behalf_of=person)
        return message, call

    def _promote(self, body: Promotion, person: str) -> tuple[Message, Awaitable[Any]]:
        call = self.steering.promote(on_behalf_of=person)
        return trainer_pb2.PromoteWeightsRequest(), call

    def _set_activity(self, body: QueueActivity, person: str) -> tuple[Message, Awaitable[Any]]:
        activity = _ACTIVITIES.get(body.activity)
        if activity is None:
            raise InvalidArgument(f"activity must be one of {', '.join(_ACTIVITIES)}")
        message = scheduler_pb2.SetActivityRequest(activity=activity)
        return message, self.operator.set_activity(activity)

    def _drain(self, body: Drain, person: str) -> tuple[Message, Awaitable[Any]]:
        if role_of(body.kind) not in DRAINED_KINDS:
            raise InvalidArgument(f"kind must be one of {', '.join(DRAINED_KINDS)}")
        message = drain_pb2.SetDrainingRequest(draining=body.draining, on_behalf_of=person)
        return message, self._set_draining(body, message)

    def _drain_runner(self, body: RunnerDrain, person: str) -> tuple[Message, Awaitable[Any]]:
        message = scheduler_pb2.SetRunnerDrainingRequest(
            runner_id=body.instance, draining=body.draining, on_behalf_of=person
        )
        call = self.operator.set_runner_draining(body.instance, body.draining, on_behalf_of=person)
        return message, call

    async def _set_draining(self, body: Drain, message: drain_pb2.SetDrainingRequest) -> None:
        """Raises `NotFound` for an instance that is not in discovery."""
        for one in await self.coordinator.all_instances():
            if (one.kind, one.instance_id) == (body.kind, body.instance):
                stub: Any = self.channels.stub(drain_pb2_grpc.DrainServiceStub, one.address)
                async with translated():
                    await stub.SetDraining(message, timeout=DRAIN_S)
                return
        raise NotFound(f"{body.kind} {body.instance} is not in discovery")


async def _body_of(request: web.Request, kind: type[Body]) -> Body:
    """Raises `InvalidArgument` that names the field."""
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"the body is not valid: {error}") from None
