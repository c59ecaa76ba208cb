"""Orders of rank 0 to the first rank of each data group while a batch is read, and their answers.

They travel between ranks of one release. An answer never has tokens: those stay where they were
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import forge.core.errors
from forge.core.errors import ForgeError
from forge.core.routes import RouteShape
from services.trainer.batches.logged_rollouts import LoggedRollout
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.group_facts import GroupCredit, GroupFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedGroup:
    """A group to be read."""

    number: int
    """Number of the group among all groups leased for the batch."""
    pool_shard: str
    trajectory_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadGroups:
    """Read groups and answer their facts. Groups that the rank has read are not read again."""

    batch: int
    """Number of the batch; the rank drops what it has of batches before the previous one."""
    groups: tuple[LeasedGroup, ...]
    addresses: Mapping[str, tuple[str, ...]]
    """Addresses of the instances of each pool shard."""
    rules: CreditRules
    baselines_s: Mapping[str, float]
    traced: bool
    """Answer trace contexts."""
    patience_s: float
    """Longest wait for an unreachable shard at these addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedGroup:
    """Credit of a group of the rank, as the whole batch determines it."""

    number: int
    credit: GroupCredit
    update: int
    """Number of its mini-batch; 0 without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Settings of `forge.rl.learner.batch_plan.plan_updates`."""

    token_budget: int
    channels: int
    relay: bool
    route_shape: RouteShape | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGroups:
    """Plan the trees of the rank's groups; the others of the batch are dropped."""

    batch: int
    groups: tuple[CreditedGroup, ...]
    updates: int
    rules: CreditRules
    settings: PlanSettings
    rows: tuple[tuple[int, int], ...]
    """Group and place in it of each rollout whose row is in the answer."""


ReadOrder = ReadGroups | PlanGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAnswer:
    """Answer of one rank to one order."""

    error: tuple[str, str] | None = None
    """Name and message of the error that ended the order."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """The error of each trajectory that the pool cannot read."""
    facts: Mapping[int, GroupFacts] = field(default_factory=dict)
    """By number of the group."""
    traceparents: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    rows: tuple[LoggedRollout, ...] = ()
    plan_s: float = 0.0
    """Time of planning."""


def failed(error: ForgeError) -> ReadAnswer:
    """The answer of an order that an error ended."""
    return ReadAnswer(error=(type(error).__name__, str(error)))


def error_of(answer: ReadAnswer, *, group: int) -> ForgeError | None:
    """The error of a data group's answer, as it was raised there."""
    if answer.error is None:
        return None
    name, message = answer.error
    kind = getattr(forge.core.errors, name, ForgeError)
    found: ForgeError = kind(f"data group {group}: {message}")
    return found
