"""Call labels: the agent's own name in one call, and whether the call is trained.

Headers `X-Forge-Agent: NAME` and `X-Forge-Train: true|false`; for clients without headers a suffix
of the API key: `KEY+NAME` names the agent, `KEY~NAME` also keeps the call out of training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from forge.core.errors import InvalidArgument

AGENT_HEADER, TRAIN_HEADER = "X-Forge-Agent", "X-Forge-Train"
_NAME = re.compile(r"[A-Za-z0-9._-]{0,64}")
_SUFFIX = re.compile(r"([^+~]*)([+~])(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CallLabels:
    """The labels of one call."""

    agent: str = ""
    """Name of the agent or sub-agent that makes the call."""
    train: bool | None = None
    """Whether the call is trained; None: by the trainer's rule."""


NO_LABELS = CallLabels()
LABELS: ContextVar[CallLabels] = ContextVar("labels", default=NO_LABELS)
"""Marks of the request that this task handles; set by the edge that received it."""


def split_key(key: str) -> tuple[str, CallLabels]:
    """Returns the token of an API key and the labels of its suffix. Raises `InvalidArgument`."""
    found = _SUFFIX.fullmatch(key)
    if found is None:
        return key, CallLabels()
    token, sign, name = found.groups()
    return token, CallLabels(_checked(name, "the suffix of the API key"), _TRAINED[sign])


def with_headers(labels: CallLabels, headers: Mapping[str, str]) -> CallLabels:
    """Returns the labels with those of the headers, which win. Raises `InvalidArgument`."""
    agent, train = headers.get(AGENT_HEADER), headers.get(TRAIN_HEADER)
    if train is not None and train.lower() not in ("true", "false"):
        raise InvalidArgument(f"{TRAIN_HEADER} {train[:80]!r} must be true or false")
    return CallLabels(
        labels.agent if agent is None else _checked(agent, AGENT_HEADER),
        labels.train if train is None else train.lower() == "true",
    )


_TRAINED = {"+": None, "~": False}


def _checked(name: str, source: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{source} {name[:80]!r} must be at most 64 of [A-Za-z0-9._-]")
    return name
