"""What only a gateway complains about, beyond the one error tree."""

from __future__ import annotations

from forge.core.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable


class ContextTooLong(InvalidArgument):
    """The prompt leaves no room for an answer; the message has the numbers."""


class UnknownModel(NotFound):
    """This gateway serves another model."""


class RouterLost(Unavailable):
    """The stream to a router ended, and with it every call on it."""


class SessionClosed(FailedPrecondition):
    """The trajectory is sealed or abandoned: nothing can be added to it."""


class UnknownResponse(NotFound):
    """No turn of this session has this response id, or its response was deleted."""


class UnknownPreviousResponse(InvalidArgument):
    """The same, of the response that a request goes on from."""
