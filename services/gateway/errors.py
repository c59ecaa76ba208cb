"""Errors of the gateway, as leaves of the error tree."""

from __future__ import annotations

from forge.core.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable


class UnknownModel(NotFound):
    """This gateway serves another model."""


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
