"""Filters of `forge trajectories`: refused by the names of their options, before a connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge.cli.connection import Connection
from forge.cli.options import FilterOptions
from forge.cli.pool.pool_reading import show_trajectory
from forge.core.errors import InvalidArgument


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            {"since": "2026-02-01T00:00+00:00", "until": "2026-01-01T00:00+00:00"},
            "--since 2026-02-01T00:00:00Z is above --until 2026-01-01T00:00:00Z",
        ),
        ({"min_reward": 1.0, "max_reward": 0.5}, "--min-reward 1 is above --max-reward 0.5"),
        ({"min_version": 4, "max_version": 3}, "--min-version 4 is above --max-version 3"),
        ({"min_reward": float("nan")}, "--min-reward is not a number"),
        ({"state": "open", "domain": "code"}, "--domain is set, which no open trajectory has"),
        ({"state": "open", "since": "2h"}, "--since is set, which no open trajectory has"),
        ({"task": ["t"] * 1001}, "--task has 1001, at most 1000"),
    ],
)
def test_filter_without_possible_matches_is_refused(given: dict[str, Any], complaint: str) -> None:
    """Times are dates, not seconds since 1970."""
    with pytest.raises(InvalidArgument) as refused:
        FilterOptions(**given).resolved()
    assert str(refused.value) == complaint


async def test_malformed_id_is_refused_before_a_connection() -> None:
    """Without an etcd."""
    nowhere = Connection(etcd="127.0.0.1:1", cluster="c", key_file=Path("/nonexistent"))
    with pytest.raises(InvalidArgument, match="must be task_id:rollout_index:attempt"):
        await show_trajectory(nowhere, "t", full=False, with_values=False, as_json=False)
