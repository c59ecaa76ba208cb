"""The stream of turns to a pool shard that is absent, for a while or for good."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forge.core.errors import FailedPrecondition, Unavailable
from forge.runtime.coordination import Versioned
from forge.runtime.coordination.shard_record import LOST, RETIRED, ShardRecord
from services.gateway.app import GatewayApp


def record(gone: str) -> ShardRecord:
    return ShardRecord(
        lineage="l", directory_id="", data_dir="", host="", instance_id="", gone=gone
    )


async def open_stream(stored: ShardRecord | None) -> None:
    """To a shard in no discovery, with this record in etcd."""

    async def get(key: str) -> Versioned | None:
        assert key == "pool/shards/s0"
        return None if stored is None else Versioned(value=stored.encoded(), mod_revision=1)

    async def absent(shard: str) -> Any:
        raise Unavailable(f"no instance serves {shard}")

    context: Any = SimpleNamespace(coordinator=SimpleNamespace(get=get))
    pool: Any = SimpleNamespace(open_append_stream=absent)
    await GatewayApp(context)._open_stream(pool, "s0")


@pytest.mark.parametrize("gone", [LOST, RETIRED])
async def test_stream_to_a_shard_that_is_gone_is_refused(gone: str) -> None:
    """By the record that the scheduler's leader marks."""
    with pytest.raises(FailedPrecondition, match=f"pool shard s0 was {gone}"):
        await open_stream(record(gone))


@pytest.mark.parametrize("stored", [None, record("")])
async def test_stream_to_an_absent_shard_is_tried_again(stored: ShardRecord | None) -> None:
    """It may restart."""
    with pytest.raises(Unavailable, match="no instance serves s0"):
        await open_stream(stored)
