"""The one error tree.

    ForgeError
      InvalidArgument      a field is wrong: the message names field and value
        ConfigError        a setting is wrong: names file, key, value and what is allowed
      Unauthenticated      no credential, a forged or an expired one
      PermissionDenied     a genuine credential without the scope needed
      NotFound             an unknown task, trajectory, batch, session, model or version
      FailedPrecondition   the record's state forbids it: sealed, not all turns arrived
        StaleFence         a deposed leader's write, or a lost compare-and-swap
        LeaseLost          the claim this rests on has expired
      Conflict             somebody else was first: read again, then decide anew
      ResourceExhausted    a bounded queue, the disk or the budget is full: retry later
        MailboxFull        the actor asked has too much to do
      Unavailable          starting, draining, or gone: retry
        ActorStopped       the actor asked is no longer there
      DeadlineExceeded     no answer in time; the outcome is unknown
      DataLoss             a checksum failed: an operator must look

The gRPC status of an error is its `code`; `forge.runtime.rpc` does the translation, both ways,
and nothing else does.
"""

from __future__ import annotations

from typing import ClassVar


class ForgeError(Exception):
    """Base of every error that Forge raises on purpose; `str(error)` is for people."""

    code: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status code."""
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    """Whether the same call may succeed later without any change to it."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InvalidArgument(ForgeError):
    code = "INVALID_ARGUMENT"
    http_status = 400


class ConfigError(InvalidArgument):
    pass


class Unauthenticated(ForgeError):
    code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(ForgeError):
    code = "PERMISSION_DENIED"
    http_status = 403


class NotFound(ForgeError):
    code = "NOT_FOUND"
    http_status = 404


class FailedPrecondition(ForgeError):
    code = "FAILED_PRECONDITION"
    http_status = 409


class StaleFence(FailedPrecondition):
    pass


class LeaseLost(FailedPrecondition):
    pass


class Conflict(ForgeError):
    code = "ABORTED"
    http_status = 409


class ResourceExhausted(ForgeError):
    code = "RESOURCE_EXHAUSTED"
    http_status = 429
    retryable = True


class MailboxFull(ResourceExhausted):
    pass


class Unavailable(ForgeError):
    code = "UNAVAILABLE"
    http_status = 503
    retryable = True


class ActorStopped(Unavailable):
    pass


class DeadlineExceeded(ForgeError):
    code = "DEADLINE_EXCEEDED"
    http_status = 504
    retryable = True


class DataLoss(ForgeError):
    code = "DATA_LOSS"
    http_status = 500
