"""Errors as OpenAI's clients know them."""

from __future__ import annotations

from typing import Any

from forge.core.errors import ForgeError, Unauthenticated
from services.gateway.errors import ContextTooLong, UnknownModel

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_CODES: dict[type[ForgeError], str] = {
    ContextTooLong: "context_length_exceeded",
    UnknownModel: "model_not_found",
    Unauthenticated: "invalid_api_key",
}


def error_body(error: ForgeError) -> dict[str, Any]:
    return body(error.http_status, str(error), _CODES.get(type(error), error.code.lower()))


def body(status: int, message: str, code: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_headers(error: ForgeError) -> dict[str, str]:
    """When to come back, and whether: clients retry by status, and some statuses mislead them."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if error.retryable:
        after_s = 1.0 if error.retry_after_s is None else error.retry_after_s
        headers["Retry-After"] = str(max(0, round(after_s)))
        headers["Retry-After-Ms"] = str(max(0, round(after_s * 1000)))
    return headers
