"""The error tree on the wire: ForgeError to gRPC status and back.

The status code is for every client; for Forge's clients the trailing metadata `forge-error` has the
exact class, and `retry-after-ms` the hint of RESOURCE_EXHAUSTED and UNAVAILABLE.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from forge.core import errors
from forge.core.errors import ForgeError

ERROR_KEY = "forge-error"
RETRY_AFTER_KEY = "retry-after-ms"

_BY_CODE: dict[grpc.StatusCode, type[ForgeError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidArgument,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: errors.FailedPrecondition,
    grpc.StatusCode.ABORTED: errors.Conflict,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.CANCELLED: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.DATA_LOSS: errors.DataLoss,
}

_CONNECTION_LOST = (
    "RST_STREAM",
    "Stream removed",
    "Socket closed",
    "Connection reset",
    "Internal error from Core",
)
"""gRPC's texts of an INTERNAL or UNKNOWN after the peer died during a call, or ended a stream
during a write; gRPC may then lose the peer's own status."""
_TOO_BIG = "message larger than max"
"""gRPC's text of the RESOURCE_EXHAUSTED that a retry cannot cure."""


_BY_NAME = {
    name: error
    for name, error in vars(errors).items()
    if isinstance(error, type) and issubclass(error, ForgeError)
}
"""The tree; a service's own subclass arrives as its ancestor in the tree."""


def to_status(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Return code and details; other exceptions than ForgeError are INTERNAL without details."""
    if isinstance(error, ForgeError):
        return grpc.StatusCode[error.code], str(error)
    return grpc.StatusCode.INTERNAL, "internal error; the service's log has the cause"


def trailing_metadata(error: BaseException) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata of an error: its class and its retry hint."""
    if not isinstance(error, ForgeError):
        return ()
    known = next(one for one in type(error).__mro__ if one in _BY_NAME.values())
    pairs = [(ERROR_KEY, known.__name__)]
    if error.retry_after_s is not None:
        pairs.append((RETRY_AFTER_KEY, str(max(0, round(error.retry_after_s * 1000)))))
    return tuple(pairs)


def from_rpc_error(error: grpc.RpcError) -> ForgeError:
    """Return the peer's ForgeError; a lost connection is Unavailable."""
    # Pairs in asynchronous and blocking calls; the stubs type only the former.
    pairs: Any = error.trailing_metadata() or ()
    metadata = {str(key): value for key, value in pairs}
    return from_status(error.code(), error.details() or "", metadata)


def from_status(
    code: grpc.StatusCode, details: str, metadata: Mapping[str, str | bytes]
) -> ForgeError:
    """Return the ForgeError of a status with this trailing metadata."""
    details = details or code.name
    error_type = _BY_NAME.get(str(metadata.get(ERROR_KEY, "")), _BY_CODE.get(code, ForgeError))
    if error_type is ForgeError and any(phrase in details for phrase in _CONNECTION_LOST):
        error_type = errors.Unavailable
    if error_type is errors.ResourceExhausted and _TOO_BIG in details:
        error_type = errors.InvalidArgument
    hint = str(metadata.get(RETRY_AFTER_KEY, ""))
    return error_type(details, retry_after_s=int(hint) / 1000 if hint.isdecimal() else None)


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """`async with translated():` or `@translated()`: raises gRPC errors as ForgeErrors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
