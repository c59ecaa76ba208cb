"""The sampling policy in the tokens of a task's rollouts."""

from __future__ import annotations

from typing import Any

import pytest

from forge.v1 import common_pb2 as pb
from services.scheduler.rollout_leases import sampling_policy

BY_DOMAIN = {"code": "bound"}
EVAL: Any = {"purpose": pb.PURPOSE_EVAL}


@pytest.mark.parametrize(
    ("task", "policy"),
    [
        ({}, "override"),
        ({"domain": "code"}, "bound"),
        ({"domain": "code", "sampling": pb.SAMPLING_POLICY_AGENT}, "agent"),
        ({"domain": "code"} | EVAL, "agent"),
        ({"sampling": pb.SAMPLING_POLICY_OVERRIDE} | EVAL, "override"),
    ],
)
def test_task_then_domain_then_default_decides(task: dict[str, Any], policy: str) -> None:
    """Evaluations use the agent's parameters unless their task says otherwise."""
    assert sampling_policy(pb.Task(**task), BY_DOMAIN) == policy
