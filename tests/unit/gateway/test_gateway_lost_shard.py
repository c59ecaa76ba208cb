"""Calls to a pool shard that is absent, for a while or for good."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge.core.errors import FailedPrecondition, Unavailable
from forge.runtime.coordination import Versioned
from forge.runtime.coordination.shard_record import LOST, RETIRED, ShardRecord, gone_text
from forge.runtime.security.tokens import Claims
from services.gateway.pool_client import Pool

CLAIMS = Claims(subject="t:0:0", scopes=frozenset(), trajectory_id="t:0:0", pool_shard="s0")


class NoShards:
    """A remote without instances."""

    def __init__(self) -> None:
        self.waits = 0

    def instances(self) -> tuple[()]:
        return ()

    async def pick(self, *, where: Any, timeout_s: float) -> Any:
        self.waits += 1
        raise Unavailable("no fitting instance")


def record(gone: str) -> ShardRecord:
    return ShardRecord(
        lineage="l", directory_id="", data_dir="", host="", instance_id="", gone=gone
    )


def pool_without(remote: NoShards, stored: ShardRecord | Exception | None) -> Pool:
    """Pool shard s0 is in no discovery, and has this record in etcd."""

    async def get(key: str) -> Versioned | None:
        assert key == "pool/shards/s0"
        if isinstance(stored, Exception):
            raise stored
        return None if stored is None else Versioned(value=stored.encoded(), mod_revision=1)

    coordinator: Any = SimpleNamespace(get=get)
    gone = partial(gone_text, coordinator)
    return Pool(cast(Any, remote), timeout_s=30.0, wait_s=2.0, gone=gone)


def seal(pool: Pool) -> Any:
    return pool.seal(CLAIMS, turns=1, rewards=(), abandon_reason="", closing_agent_s=None)


CALLS = [
    pytest.param(lambda pool: pool.open_append_stream("s0"), id="turns"),
    pytest.param(seal, id="seal"),
    pytest.param(lambda pool: pool.annotate(CLAIMS, ()), id="rewards"),
    pytest.param(lambda pool: pool.stored(CLAIMS), id="read"),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("gone", [LOST, RETIRED])
async def test_call_to_a_shard_that_is_gone_is_refused_at_once(
    gone: str, call: Callable[[Pool], Any]
) -> None:
    """By the record that the scheduler's leader marks, without a wait: the runner reports the
    attempt, and the next one gets the present shard."""
    remote = NoShards()
    with pytest.raises(FailedPrecondition, match=f"pool shard s0 was {gone}"):
        await call(pool_without(remote, record(gone)))
    assert not remote.waits


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("stored", [None, record(""), Unavailable("etcd does not answer")])
async def test_call_to_an_absent_shard_is_tried_again(
    stored: ShardRecord | Exception | None, call: Callable[[Pool], Any]
) -> None:
    """It may restart."""
    with pytest.raises(Unavailable, match="no instance serves pool shard 's0'"):
        await call(pool_without(NoShards(), stored))
