"""Fields of a request that no protocol module uses: harmless, named in a header, or refused.

Owns the rule that nothing is dropped in silence. A field without effect on the answer is harmless.
A field that another server would honour is refused by name and value, unless its value is neutral.
The header `X-Forge-Ignored` names all other fields, unknown ones too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from services.gateway.errors import InvalidField
from services.gateway.http.request_fields.request_body import UNREADABLE, decode
from services.gateway.metrics import IGNORED_PARAMETERS

IGNORED = "X-Forge-Ignored"
"""Header of the response: names of fields without effect, separated by commas."""
MAX_HEADER = 1000
"""Longest value of that header."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})
Request = TypeVar("Request", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fields:
    """The fields that a protocol knows and does not use."""

    harmless: frozenset[str]
    """Without effect on any answer."""
    ignored: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Without effect here, each with its neutral values beside empty ones; others are named."""
    refused: Mapping[str, tuple[str, tuple[Any, ...]]] = field(default_factory=dict)
    """Each with the reason, and its values that change nothing, besides empty ones."""


def decode_request(
    body: bytes, kind: type[Request], fields: Fields
) -> tuple[Request, dict[str, str]]:
    """Decodes a body; returns it with the headers of its response.

    Raises `InvalidField` with the place of an error, and for a refused field with its value.
    """
    strict, loose, known = _kinds(kind, fields)
    unknown: list[str] = []
    try:
        asked = msgspec.json.decode(body or b"{}", type=strict)
    except UNREADABLE:
        # Unknown fields are rare; only then the body is decoded twice.
        asked = decode(body, loose)
        unknown = sorted(decode(body, dict[str, msgspec.Raw]).keys() - known)
    for name, (why, neutral) in fields.refused.items():
        value = getattr(asked, name)
        if not _is_neutral(value, neutral):
            raise InvalidField(f"{name} = {_shown(value)} is not supported: {why}", param=name)
    ignored = [
        name
        for name, neutral in fields.ignored.items()
        if not _is_neutral(getattr(asked, name), neutral)
    ]
    headers: dict[str, str] = {}
    add_ignored(headers, *ignored)
    if unknown:
        IGNORED_PARAMETERS.labels("unknown").inc(len(unknown))
        # A name may have any characters, and a header few.
        _name(headers, [one if _NAME.fullmatch(one) else "?" for one in unknown])
    return cast(Request, asked), headers


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    if value is False and True in neutral:
        return False
    return value in _EMPTY or value in neutral


def add_ignored(headers: dict[str, str], *names: str) -> None:
    """Adds names of fields without effect to the headers of a response, and counts them."""
    for name in names:
        IGNORED_PARAMETERS.labels(name).inc()
    _name(headers, names)


def _name(headers: dict[str, str], names: Sequence[str]) -> None:
    """Adds names to the header."""
    named = [one for one in (headers.get(IGNORED, ""), *names) if one]
    if named:
        headers[IGNORED] = ", ".join(named)[:MAX_HEADER]


@cache
def _kinds(kind: type[Request], fields: Fields) -> tuple[Any, Any, frozenset[str]]:
    """Returns `kind` with the fields of `fields`, strict and loose about others, and all names."""
    more = [
        # Named as in the protocol: bases of other names may rename theirs.
        (name, Any, msgspec.field(default=None, name=name))
        for name in (*fields.harmless, *fields.ignored, *fields.refused)
    ]
    strict, loose = (
        msgspec.defstruct(
            kind.__name__, more, bases=(kind,), kw_only=True, forbid_unknown_fields=forbidden
        )
        for forbidden in (True, False)
    )
    return strict, loose, frozenset(one.encode_name for one in msgspec.structs.fields(loose))


def _shown(value: Any) -> str:
    """Returns the beginning of a value's JSON text."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
