"""Kinds of failures of an attempt: the task's, or the infrastructure's.

Owns the two kinds, and their marks in the reasons of abandoned trajectories.
`forge.core.queue.rollouts` counts them.
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
"""Errors of a rollout when services of Forge fail. `FailedPrecondition`: a gateway died and lost
turns that it had answered."""
_HOST_ERRNOS = frozenset(
    {errno.EAGAIN, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC}
)
"""Exhausted resources of the runner's host."""


class FailureKind(enum.Enum):
    """Cause of a failed attempt."""

    TASK = "task"
    """The agent program, its tools or its reward function failed, or took too long. Counts against
    `max_attempts`."""
    INFRASTRUCTURE = "infrastructure"
    """A service was unreachable, a disk full, a runner stopped, restarted or slow. Counts only
    against `max_losses`, and only while other rollouts succeed."""


def kind_of_error(error: BaseException) -> FailureKind:
    """The kind of a raised error."""
    exhausted = isinstance(error, OSError) and error.errno in _HOST_ERRNOS
    if exhausted or isinstance(error, _INFRASTRUCTURE_ERRORS):
        return FailureKind.INFRASTRUCTURE
    return FailureKind.TASK


def abandon_reason(kind: FailureKind, reason: str) -> str:
    """The reason that the pool stores with an abandoned trajectory."""
    return _INFRASTRUCTURE_PREFIX + reason if kind is FailureKind.INFRASTRUCTURE else reason


def kind_of_abandoned(reason: str) -> FailureKind:
    """The kind of a stored reason of an abandoned trajectory."""
    infrastructure = reason.startswith(_INFRASTRUCTURE_PREFIX)
    return FailureKind.INFRASTRUCTURE if infrastructure else FailureKind.TASK
