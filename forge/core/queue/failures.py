"""Whose failure it is that an attempt at a rollout did not succeed.

Owns the two kinds, and how the reason of an abandoned trajectory tells them apart. What each costs
a rollout is `forge.core.queue.rollouts`' business.
"""

from __future__ import annotations

import enum
import errno

from forge.core.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)

_INFRASTRUCTURE_PREFIX = "infrastructure: "
_INFRASTRUCTURE_ERRORS = (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
"""What a rollout meets when Forge's services fail it. `FailedPrecondition`: a gateway died with
turns that it had answered."""
_HOST_ERRNOS = frozenset(
    {errno.EAGAIN, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC}
)
"""What the runner's host has run out of."""


class FailureKind(enum.Enum):
    TASK = "task"
    """The task's own: the agent program, its tools or its reward function failed, or took too
    long. Counts against `max_attempts`."""
    INFRASTRUCTURE = "infrastructure"
    """A service was away, a disk full, a runner stopped, restarted or slow. Counts only against
    `max_losses`, and only while other rollouts succeed."""


def kind_of_error(error: BaseException) -> FailureKind:
    """The kind of a failure, by what was raised."""
    exhausted = isinstance(error, OSError) and error.errno in _HOST_ERRNOS
    if exhausted or isinstance(error, _INFRASTRUCTURE_ERRORS):
        return FailureKind.INFRASTRUCTURE
    return FailureKind.TASK


def abandon_reason(kind: FailureKind, reason: str) -> str:
    """The reason that the pool stores with an abandoned trajectory."""
    return _INFRASTRUCTURE_PREFIX + reason if kind is FailureKind.INFRASTRUCTURE else reason


def kind_of_abandoned(reason: str) -> FailureKind:
    """The kind of the failure that a trajectory was abandoned for, by its stored reason."""
    infrastructure = reason.startswith(_INFRASTRUCTURE_PREFIX)
    return FailureKind.INFRASTRUCTURE if infrastructure else FailureKind.TASK
