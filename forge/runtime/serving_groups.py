"""Serving groups: routers and workers of another model than the policy, in one cluster.

A router sends requests to workers of its own group alone, and a gateway finds the routers of a
group by its name. Owns the kinds of their directory entries. The instances of the policy have no
group.
"""

from __future__ import annotations

import re

from forge.core.errors import InvalidArgument

MARK = "@"
"""Between the kind and the group of an entry."""
_STARTING = "~"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def kind_in(group: str, kind: str) -> str:
    """Return the kind of a group's instances in discovery; "" is the group of the policy."""
    return f"{kind}{MARK}{group}" if group else kind


def role_of(kind: str) -> str:
    """Return the kind without its group."""
    return kind.partition(MARK)[0]


def starting_in(group: str) -> str:
    """Return the kind of a group's workers that fetch their first weights: they relay these to one
    another and serve no request. No group has a name with this end."""
    return f"prefill{MARK}{group}{_STARTING}"


def is_starting(kind: str) -> bool:
    """Whether instances of a kind have no weights yet."""
    return kind.endswith(_STARTING)


def check_group(setting: str, group: str) -> None:
    """Raises `InvalidArgument` for a malformed name."""
    if group and not _NAME.fullmatch(group):
        raise InvalidArgument(f"{setting} = {group[:80]!r} must be at most 64 of [A-Za-z0-9._-]")
