"""The lease of one rollout: its task, and signed tokens for its agent and its grader.

Owns the claims of both tokens; the settings and the task decide them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace

from forge.core.enum_words import enum_word
from forge.core.tasks.template_kwargs import kwargs_json, merged
from forge.runtime.security.tokens import Claims, Keyring, new_token_id
from forge.v1 import common_pb2, scheduler_pb2
from services.scheduler.config import SchedulerConfig
from services.scheduler.state.messages.rollouts import Grant

_REST_BYTES = 4 << 10
"""Most bytes of a lease besides its task and the variable claims of its tokens: each task or
trajectory id has at most 222."""


def lease_bytes(task: common_pb2.Task, config: SchedulerConfig) -> int:
    """Return an upper bound of the size of a lease, in bytes."""
    kwargs = template_kwargs(task, config)
    claims = json.dumps([kwargs, task.domain, task.user, *task.models])
    # Both tokens have the claims in base 64.
    return task.ByteSize() + _REST_BYTES + 2 * len(claims) * 4 // 3


def template_kwargs(task: common_pb2.Task, config: SchedulerConfig) -> str:
    """Return the variables of the chat template: the domain's, and those of the task over them."""
    of_domain = config.domain_chat_template_kwargs.get(task.domain, "")
    return kwargs_json(merged(of_domain, task.chat_template_kwargs_json))


def rollout_lease(
    grant: Grant, config: SchedulerConfig, keyring: Keyring
) -> scheduler_pb2.RolloutLease:
    """Return the lease of a granted rollout."""
    claims = Claims(
        subject=grant.trajectory_id,
        scopes=frozenset({"session"}),
        token_id=new_token_id(),
        audience=frozenset({"GatewayService"}),
        issued_unix_s=time.time(),
        trajectory_id=grant.trajectory_id,
        task_id=grant.task.task_id,
        domain=grant.task.domain,
        tenant=grant.task.user,
        pool_shard=grant.pool_shard,
        context_tokens=config.domain_context_tokens.get(grant.task.domain, 0),
        agent_rewards=grant.task.agent_rewards,
        chat_template_kwargs=template_kwargs(grant.task, config),
        sampling=sampling_policy(grant.task, config.domain_sampling),
        models=tuple(grant.task.models),
        expires_unix_s=time.time() + config.session_ttl_s,
    )
    grader = replace(claims, scopes=frozenset({"grader"}), token_id=new_token_id())
    return scheduler_pb2.RolloutLease(
        lease_id=grant.trajectory_id,
        task=grant.task,
        rollout_index=grant.rollout_index,
        trajectory_id=grant.trajectory_id,
        session_token=keyring.sign(claims),
        grader_token=keyring.sign(grader),
        lease_s=config.queue.rollout_lease_s,
        failures=grant.failures,
    )


def sampling_policy(task: common_pb2.Task, by_domain: Mapping[str, str]) -> str:
    """Return the policy of a task: its own, its domain's in training, or the default."""
    # A scheduler of a later release may have stored a policy that is not known here.
    if task.sampling and task.sampling in common_pb2.SamplingPolicy.values():
        return enum_word(common_pb2.SamplingPolicy, task.sampling)
    if task.purpose == common_pb2.PURPOSE_EVAL:
        return "agent"
    return by_domain.get(task.domain, "override")
