"""Error responses in OpenAI's, Anthropic's and Google's formats.

Owns the formats, the choice between them, and the public text of internal errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Any

from aiohttp import web

from forge.core.errors import ContextTooLong, ForgeError, Unauthenticated, UnsupportedByEngines
from forge.runtime.telemetry import log
from services.gateway.errors import (
    InvalidField,
    ModelNotAllowed,
    UnknownModel,
    UnknownPreviousResponse,
    UnknownResponse,
    UnsupportedEncoding,
)
from services.gateway.http.bodies import READABLE_ENCODINGS

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    426: "invalid_request_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {
    408: "timeout_error",
    413: "request_too_large",
    # Anthropic's API uses 529. Clients retry both, and proxies know only 503.
    503: "overloaded_error",
    504: "timeout_error",
}
_GOOGLE_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "INVALID_ARGUMENT",
    408: "DEADLINE_EXCEEDED",
    409: "FAILED_PRECONDITION",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_CODES: dict[type[ForgeError], str] = {
    ContextTooLong: "context_length_exceeded",
    UnsupportedByEngines: "unsupported_parameter",
    UnknownModel: "model_not_found",
    UnknownPreviousResponse: "previous_response_not_found",
    UnknownResponse: "response_not_found",
    UnsupportedEncoding: "unsupported_encoding",
    Unauthenticated: "invalid_api_key",
}
_PARAMS: dict[type[ForgeError], str] = {
    UnknownModel: "model",
    ModelNotAllowed: "model",
    UnknownPreviousResponse: "previous_response_id",
}
"""The fields of errors that concern one field alone."""

REQUEST_ID = web.RequestKey("request_id", str)
"""Id that Anthropic's clients put into their logs and errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed request, independent of the protocol."""

    status: int
    message: str
    code: str
    param: str | None = None
    """The wrong field, in OpenAI's format."""
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: ForgeError, *, prompt: str | None = None) -> Failure:
        """Converts an error; `prompt`: the field of the request that has the prompt."""
        return cls(
            status=error.http_status,
            message=str(error),
            code=_CODES.get(type(error), error.code.lower()),
            param=prompt if isinstance(error, ContextTooLong) else _param(error),
            headers=failure_headers(error),
        )


def _param(error: ForgeError) -> str | None:
    known = error.param if isinstance(error, InvalidField) else _PARAMS.get(type(error))
    return known or None


def public_error(error: Exception) -> ForgeError:
    """Returns the error for the agent. A bug is logged and becomes a general error; of several
    failed choices, the first error counts."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ForgeError):
        return error
    log.error("http_request_failed", exc_info=error)
    return ForgeError("internal error; the gateway's log has the cause")


def openai_error(failure: Failure) -> dict[str, Any]:
    """Returns the body of an error in OpenAI's format."""
    return {
        "error": {
            "message": failure.message,
            "type": _OPENAI_TYPES.get(failure.status, "server_error"),
            "param": failure.param,
            "code": failure.code,
        }
    }


def anthropic_error(failure: Failure, request_id: str) -> dict[str, Any]:
    """Returns the body of an error in Anthropic's format."""
    kind = _ANTHROPIC_TYPES.get(failure.status, "api_error")
    error = {"type": kind, "message": failure.message}
    return {"type": "error", "error": error, "request_id": request_id}


def google_error(failure: Failure) -> dict[str, Any]:
    """Returns the body of an error in Google's format."""
    status = _GOOGLE_STATUSES.get(failure.status, "INTERNAL")
    error = {"code": failure.status, "message": failure.message, "status": status}
    return {"error": error}


def speaks_google(request: web.Request) -> bool:
    """Returns True for requests with Google's header for the key, or a path of Gemini's API."""
    path = request.path
    return (
        "x-goog-api-key" in request.headers
        or "/v1beta/" in path
        or path.endswith((":generateContent", ":streamGenerateContent", ":countTokens"))
    )


def speaks_anthropic(request: web.Request) -> bool:
    """Returns True for requests with Anthropic's version header or path."""
    return "anthropic-version" in request.headers or "/v1/messages" in request.path


def failure_headers(error: ForgeError) -> dict[str, str]:
    """Returns the retry headers, because some statuses alone make clients decide wrongly, and the
    encodings that a request body may have."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if isinstance(error, UnsupportedEncoding):
        headers["Accept-Encoding"] = ", ".join(READABLE_ENCODINGS)
    if error.retryable:
        after_s = 1.0 if error.retry_after_s is None else error.retry_after_s
        headers["Retry-After"] = str(max(0, ceil(after_s)))
        headers["Retry-After-Ms"] = str(max(0, round(after_s * 1000)))
    return headers
