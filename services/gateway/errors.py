"""Errors of the gateway, as leaves of the error tree."""

from __future__ import annotations

from forge.core.errors import (
    FailedPrecondition,
    ForgeError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
)


class InvalidField(InvalidArgument):
    """A field of a request is wrong."""

    def __init__(self, message: str, *, param: str) -> None:
        """`param`: the place of the field, as "messages[0].content"; "" if it is unknown."""
        super().__init__(message)
        self.param = param


class UnknownModel(NotFound):
    """This gateway serves no model of this name."""


class ModelNotAllowed(PermissionDenied):
    """The task of the session may not call this model."""


class ApiRefused(ForgeError):
    """An external API refuses the operator's key, or answers otherwise than it should."""

    http_status = 502


class ApiRejected(InvalidArgument):
    """An external API refuses a request of the agent; its own answer has the reason."""

    def __init__(self, message: str, *, status: int, body: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        """A JSON object; "" if the API sent none."""


class RouterLost(Unavailable):
    """The stream to a router ended, and with it every request on it."""


class SessionClosed(FailedPrecondition):
    """The trajectory is sealed or abandoned and accepts no turns."""


class UnknownResponse(NotFound):
    """No turn of this session has this response id, or its response was deleted."""


class BrokenBody(InvalidArgument):
    """The request body does not follow its Content-Encoding; its connection is closed."""


class UnsupportedEncoding(InvalidArgument):
    """The gateway cannot read this Content-Encoding of a request body."""

    http_status = 415


class UnknownPreviousResponse(InvalidArgument):
    """No turn of this session has the `previous_response_id` of a request."""


class RequestTooLarge(InvalidArgument):
    """The request is larger than its tenant may send."""

    http_status = 413
