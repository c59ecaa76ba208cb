"""The audit log: one line per change by a person or a grader, and per call that a scope refuses.

Owns the line and its file. Services declare their audited calls as `AUDITED`, next to their scopes.
Not audited: turns and other calls of sessions, and traffic between services; the pool has both.
"""

from __future__ import annotations

import logging
import os
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from typing import Any

import structlog
from google.protobuf.message import Message

from forge.core.errors import ConfigError
from forge.runtime.security.tokens import Claims

MAX_IDS = 100
MAX_CHARS = 200
REFUSED = "PERMISSION_DENIED"

# No `log_level` drops a line.
_UNFILTERED = structlog.make_filtering_bound_logger(logging.NOTSET)
_sink: Any = structlog.wrap_logger(None, wrapper_class=_UNFILTERED)


class _PrivateFileHandler(WatchedFileHandler):
    def _open(self) -> TextIOWrapper:
        """Others read no subjects and peers."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return TextIOWrapper(os.fdopen(os.open(self.baseFilename, flags, 0o640), "ab"), "utf-8")


def configure_audit(service: str, instance_id: str, *, file: str) -> None:
    """Write to `file`, opened again after a rotation; empty: to the log. Raises ConfigError."""
    if not file:
        return
    try:
        handler = _PrivateFileHandler(file, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"audit_file = {file!r}: {error.strerror}") from None
    logger = logging.Logger("forge.audit")
    logger.addHandler(handler)
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.JSONRenderer(),
    ]
    global _sink
    _sink = structlog.wrap_logger(
        logger, processors, _UNFILTERED, service=service, instance=instance_id
    )


def write_audit(
    method: str, claims: Claims, *, peer: str, code: str, error: object, request: object = None
) -> None:
    """Write the line of one ended call; `error` is None or the reason of the code."""
    _sink.info(
        "audit",
        method=method,
        subject=claims.subject,
        token_id=claims.token_id,
        scopes=sorted(claims.scopes),
        peer=peer,
        targets=targets_of(request) if isinstance(request, Message) else {},
        code=code,
        error="" if error is None else str(error)[:MAX_CHARS],
    )


def targets_of(request: Message) -> dict[str, Any]:
    """Return the plain fields of a request and the ids of its parts, without their content."""
    targets: dict[str, Any] = {}
    for field, value in request.ListFields():
        if isinstance(value, Message):
            targets[field.name] = _id(value)
        elif isinstance(value, str | bytes | int | float):
            targets[field.name] = _plain(field, value)
        else:
            parts = (
                _id(p) if isinstance(p, Message) else _plain(field, p) for p in value[:MAX_IDS]
            )
            targets[field.name] = list(parts)
            if len(value) > MAX_IDS:
                targets[f"{field.name}_count"] = len(value)
    return targets


def _plain(field: Any, value: Any) -> Any:
    if field.enum_type is not None and value in field.enum_type.values_by_number:
        return field.enum_type.values_by_number[value].name
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return value[:MAX_CHARS] if isinstance(value, str) else value


def _id(part: Message) -> Any:
    return next((value for field, value in part.ListFields() if field.name.endswith("_id")), "")
