"""The leases of one answer fit a gRPC message, whatever tasks and settings have."""

from __future__ import annotations

import json

import pytest

from forge.core.tasks.template_kwargs import MAX_KWARGS_BYTES
from forge.core.tasks.validation import (
    MAX_MODEL_BYTES,
    MAX_MODELS,
    MAX_PAYLOAD_BYTES,
    MAX_USER_BYTES,
)
from forge.runtime.coordination import Coordinator, Discovery
from forge.runtime.rpc.channel import MAX_MESSAGE_BYTES
from forge.runtime.security.tokens import Keyring
from forge.v1 import common_pb2, scheduler_pb2
from services.scheduler.config import SchedulerConfig
from services.scheduler.rollout_leases import lease_bytes, rollout_lease
from services.scheduler.service import SchedulerServicer
from services.scheduler.state.messages.groups import Submit
from services.scheduler.state.messages.rollouts import Grant
from services.scheduler.state.term_state import MAX_GRANT_BYTES
from services.scheduler.validation import MAX_ROLLOUTS, check_tasks
from tests.support.runtime.unused import unused
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import ASK_S, TermActors

KEYRING = Keyring((bytes(32),))
EMOJI = "\N{ROCKET}"
"""Each takes two escapes in a token."""


def kwargs(name: str) -> str:
    around = len(json.dumps({name: ""}))
    most = (MAX_KWARGS_BYTES - around) // len(EMOJI.encode())
    return json.dumps({name: EMOJI * most}, ensure_ascii=False)


CONFIG = SchedulerConfig(etcd="etcd:2379", domain_chat_template_kwargs={"code": kwargs("a")})
NO_SETTINGS = SchedulerConfig(etcd="etcd:2379")


def large_task(task_id: str, *, template: str = "", payload: str = "{}") -> common_pb2.Task:
    """All names are at their bounds."""
    task = make_task(task_id, size=MAX_ROLLOUTS)
    task.payload_json, task.chat_template_kwargs_json = payload, template
    task.user = "\N{LATIN SMALL LETTER E WITH ACUTE}" * (MAX_USER_BYTES // 2)
    task.models.extend("m" * (MAX_MODEL_BYTES - 2) + f"{n:02}" for n in range(MAX_MODELS))
    return check_tasks([task], max_group_size=MAX_ROLLOUTS)[task_id]


async def test_leases_of_a_call_fit_a_message(term: TermActors) -> None:
    """A runner that asks for the most rollouts gets fewer, and the others by its next call."""
    servicer = SchedulerServicer(CONFIG, KEYRING, unused(Discovery), unused(Coordinator))
    servicer.leader = term.leader()
    task = large_task("t" * 200)
    await term.submissions.ask(Submit(tasks={task.task_id: task}), timeout_s=ASK_S)
    request = scheduler_pb2.LeaseRolloutsRequest(runner_id="r", max_rollouts=MAX_ROLLOUTS)
    for _ in range(2):
        answer = await servicer.LeaseRollouts(request, None)
        assert answer.ByteSize() < MAX_MESSAGE_BYTES
        assert 1 <= len(answer.leases) < MAX_ROLLOUTS


@pytest.mark.parametrize("config", [CONFIG, NO_SETTINGS])
@pytest.mark.parametrize("template", ["", kwargs("b"), '{"c":"\\"\\""}'])
def test_lease_is_within_its_bound(config: SchedulerConfig, template: str) -> None:
    """The bound counts both tokens. An answer with room for another lease has room for it."""
    payload = '{"a":"' + "x" * (MAX_PAYLOAD_BYTES - 8) + '"}'
    task = large_task("t" * 200, template=template, payload=payload)
    grant = Grant(
        trajectory_id=f"{task.task_id}:{MAX_ROLLOUTS}:{2**32 - 1}",
        rollout_index=MAX_ROLLOUTS,
        failures=2**31,
        pool_shard="s" * 200,
        task=task,
    )
    size_bytes = rollout_lease(grant, config, KEYRING).ByteSize()
    assert size_bytes <= lease_bytes(task, config)
    assert MAX_GRANT_BYTES + size_bytes < 4 << 20
