"""Errors as the clients of each protocol know them.

Owns the two shapes, OpenAI's and Anthropic's, who is answered with which, and what is told of bugs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from forge.core.errors import ForgeError, Unauthenticated
from forge.runtime.telemetry import log
from services.gateway.errors import (
    ContextTooLong,
    UnknownModel,
    UnknownPreviousResponse,
    UnknownResponse,
)

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    # Its own API says 529. Clients repeat both, and 503 is what proxies between them know.
    503: "overloaded_error",
    504: "timeout_error",
}
_CODES: dict[type[ForgeError], str] = {
    ContextTooLong: "context_length_exceeded",
    UnknownModel: "model_not_found",
    UnknownPreviousResponse: "previous_response_not_found",
    UnknownResponse: "response_not_found",
    Unauthenticated: "invalid_api_key",
}


REQUEST_ID = web.RequestKey("request_id", str)
"""By which Anthropic's clients name a request in what they log and raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a request has no answer, before it is put in the words of a protocol."""

    status: int
    message: str
    code: str
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: ForgeError) -> Failure:
        return cls(
            status=error.http_status,
            message=str(error),
            code=_CODES.get(type(error), error.code.lower()),
            headers=_headers(error),
        )


def told(error: Exception) -> ForgeError:
    """What an agent may know of `error`: of a bug that there is one; its cause is logged. Of
    several choices that failed together, the first one's error speaks."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ForgeError):
        return error
    log.error("http_request_failed", exc_info=error)
    return ForgeError("internal error; the gateway's log has the cause")


def openai_error(failure: Failure) -> dict[str, Any]:
    kind = _OPENAI_TYPES.get(failure.status, "server_error")
    error = {"message": failure.message, "type": kind, "param": None, "code": failure.code}
    return {"error": error}


def anthropic_error(failure: Failure, request_id: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(failure.status, "api_error")
    error = {"type": kind, "message": failure.message}
    return {"type": "error", "error": error, "request_id": request_id}


def speaks_anthropic(request: web.Request) -> bool:
    """Anthropic's clients name a version of its protocol with every request; who writes requests
    by hand may not, and is known by the path."""
    return "anthropic-version" in request.headers or "/v1/messages" in request.path


def _headers(error: ForgeError) -> dict[str, str]:
    """When to come back, and whether: clients retry by status, and some statuses mislead them."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if error.retryable:
        after_s = 1.0 if error.retry_after_s is None else error.retry_after_s
        headers["Retry-After"] = str(max(0, round(after_s)))
        headers["Retry-After-Ms"] = str(max(0, round(after_s * 1000)))
    return headers
