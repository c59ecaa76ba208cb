"""The error tree.

    ForgeError
      InvalidArgument      a field is wrong: the message names field and value
        ConfigError        a setting is wrong: names file, key, value and the allowed values
        ContextTooLong     the prompt leaves no room for an answer
        UnsupportedByEngines  no engine that is present has an ability that the request needs
      Unauthenticated      no credential, a forged or an expired one
      PermissionDenied     a genuine credential without the required scope
      NotFound             an unknown task, trajectory, batch, session, model or version
      AlreadyExists        the trajectory has another outcome
      FailedPrecondition   the record's state forbids it: sealed, turns are missing
        StaleFence         a former leader's write, or a lost compare-and-swap
      Conflict             another writer was first: read, then try again
      ResourceExhausted    a bounded queue, the disk or the budget is full: retry later
        MailboxFull        the actor's mailbox is full
        LimitReached       a limit of the record: no retry helps
      Unavailable          the process starts, drains or is unreachable: retry
        ActorStopped       the actor has stopped
      DeadlineExceeded     no answer in time; the outcome is unknown
      DataLoss             a checksum failed: an operator must act
      WorkersLost          several workers were lost to one request: an operator must act

The gRPC status of an error is its `code`; only `forge.runtime.rpc` translates, in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class ForgeError(Exception):
    """Base of every error that Forge raises on purpose; `str(error)` is for people."""

    code: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status code."""
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    """Whether the same call, unchanged, may succeed later."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InvalidArgument(ForgeError):
    """A field of the request is wrong."""

    code = "INVALID_ARGUMENT"
    http_status = 400


class ConfigError(InvalidArgument):
    """A setting is wrong."""


class ContextTooLong(InvalidArgument):
    """The prompt leaves no room for an answer; agents may compact their history and continue.

    The message has the words by which clients of OpenAI's and Anthropic's APIs find this error.
    """

    @classmethod
    def of(
        cls, *, tokens: int, limit: int, at_least: bool = False, domain: str = ""
    ) -> ContextTooLong:
        """Returns the error of a prompt with `tokens` tokens in a context of `limit` tokens, answer
        included. `at_least`: `tokens` is a lower bound. `domain`: the domain that sets the limit;
        "" for the model's own."""
        bound = " (at least)" if at_least else ""
        owner = f", as set for domain {domain}" if domain else ""
        return cls(
            f"prompt is too long: {tokens} tokens > {limit - 1} maximum{bound}. It exceeds the "
            f"context window: this model's maximum context length is {limit} tokens, answer "
            f"included{owner}. Your messages resulted in {tokens} tokens. Reduce the length of the "
            "messages."
        )


class UnsupportedByEngines(InvalidArgument):
    """No engine that is present has an ability that the request needs; the message names both."""


class Unauthenticated(ForgeError):
    """The credential is absent, forged or expired."""

    code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(ForgeError):
    """The credential lacks the scope."""

    code = "PERMISSION_DENIED"
    http_status = 403


class NotFound(ForgeError):
    """The record does not exist."""

    code = "NOT_FOUND"
    http_status = 404


class AlreadyExists(ForgeError):
    """Another record has the place of this one."""

    code = "ALREADY_EXISTS"
    http_status = 409


class FailedPrecondition(ForgeError):
    """The state of the record forbids the call."""

    code = "FAILED_PRECONDITION"
    http_status = 409


class StaleFence(FailedPrecondition):
    """A write of a former leader, or a lost compare-and-swap."""


class Conflict(ForgeError):
    """Another writer was first."""

    code = "ABORTED"
    http_status = 409


class ResourceExhausted(ForgeError):
    """A bounded resource is full."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 429
    retryable = True


class MailboxFull(ResourceExhausted):
    """The mailbox of the actor is full."""


class LimitReached(ResourceExhausted):
    """The record has as many entries as its limit allows; a retry does not help."""

    retryable = False


class Unavailable(ForgeError):
    """The process starts, drains or is unreachable."""

    code = "UNAVAILABLE"
    http_status = 503
    retryable = True


class ActorStopped(Unavailable):
    """The actor has stopped."""


class DeadlineExceeded(ForgeError):
    """No answer before the deadline; the outcome is unknown."""

    code = "DEADLINE_EXCEEDED"
    http_status = 504
    retryable = True


class DataLoss(ForgeError):
    """A checksum failed."""

    code = "DATA_LOSS"
    http_status = 500


class WorkersLost(ForgeError):
    """Several workers were lost while they served one request; a retry may lose more."""


def first_line(error: object) -> str:
    """Return the first line of an error's text, for one line of a log: torch's errors have many."""
    return str(error).strip().partition("\n")[0]


def raise_all(errors: Sequence[ForgeError]) -> None:
    """Raises a single error itself, several as one with a line for each different one:
    `Unavailable` if all are retryable, otherwise `InvalidArgument`. Without errors returns."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        lines = dict.fromkeys(map(str, errors))
        retryable = all(error.retryable for error in errors)
        raise (Unavailable if retryable else InvalidArgument)("\n".join(lines))
