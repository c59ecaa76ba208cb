"""Rules of a task's fields, for calls and for lines of a file.

Owns the rules that need no state; the rule of ids is in `forge.core.trajectory`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from forge.core.errors import InvalidArgument
from forge.core.tasks import template_kwargs

MAX_PAYLOAD_BYTES = 1 << 20
MAX_GROUP_SIZE = 4096
"""Most rollouts of one task. A group must fit one message: in a batch the summary of a sealed
trajectory takes up to 560 bytes without rewards, in a scan of the pool up to 300 beside a payload
of 1 MiB and a page of 1 MiB."""
MAX_USER_BYTES = 200
MAX_MODELS = 16
MAX_MODEL_BYTES = 128
MAX_METADATA = 16
MAX_METADATA_BYTES = 256

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class TaskFields(Protocol):
    """The fields with rules; `forge.v1.Task` has them."""

    domain: str
    scaffold: str
    group_size: int
    difficulty: float
    payload_json: str
    user: str
    chat_template_kwargs_json: str

    @property
    def models(self) -> Sequence[str]:
        """Names of models beside the policy."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Facts to find results by."""


def check_task_fields(task: TaskFields) -> None:
    """Raises `InvalidArgument` with the first wrong field and its value."""
    for field, value in (("domain", task.domain), ("scaffold", task.scaffold)):
        if not _NAME.fullmatch(value):
            raise InvalidArgument(f"{field} {value[:80]!r} must be 1 to 64 of [A-Za-z0-9._-]")
    if task.group_size < 1:
        raise InvalidArgument(f"group_size {task.group_size} must be at least 1")
    if not 0 <= task.difficulty <= 1:
        raise InvalidArgument(f"difficulty {task.difficulty} must be from 0 to 1")
    template_kwargs.checked(task.chat_template_kwargs_json, field="chat_template_kwargs_json")
    _check_models(task.models)
    check_metadata(task.metadata)
    if len(task.user.encode()) > MAX_USER_BYTES:
        raise InvalidArgument(f"user {task.user[:40]!r}... has more than {MAX_USER_BYTES} bytes")
    check_payload(task.payload_json)


def _check_models(names: Sequence[str]) -> None:
    # They are part of the session token, which agents send with each request.
    if len(names) > MAX_MODELS:
        raise InvalidArgument(f"models has {len(names)} names; at most {MAX_MODELS} are allowed")
    for name in names:
        if not 1 <= len(name.encode()) <= MAX_MODEL_BYTES:
            raise InvalidArgument(f"models has {name[:40]!r}: 1 to {MAX_MODEL_BYTES} bytes a name")


def check_metadata(metadata: Mapping[str, str], *, name: str = "metadata") -> None:
    """Raises `InvalidArgument` for too many facts, and for a wrong key or value."""
    if len(metadata) > MAX_METADATA:
        raise InvalidArgument(
            f"{name} has {len(metadata)} keys; at most {MAX_METADATA} are allowed"
        )
    for key, value in metadata.items():
        if not _NAME.fullmatch(key):
            raise InvalidArgument(f"{name} has key {key[:80]!r}: 1 to 64 of [A-Za-z0-9._-]")
        if len(value.encode()) > MAX_METADATA_BYTES:
            raise InvalidArgument(
                f"{name}.{key} {value[:40]!r}... has more than {MAX_METADATA_BYTES} bytes"
            )


def check_payload(payload_json: str, *, name: str = "payload_json") -> None:
    """Raises `InvalidArgument` for a payload that is too large."""
    size_bytes = len(payload_json.encode())
    if size_bytes > MAX_PAYLOAD_BYTES:
        raise InvalidArgument(
            f"{name} has {size_bytes} bytes (limit 1 MiB): at most {MAX_PAYLOAD_BYTES} are allowed"
        )
