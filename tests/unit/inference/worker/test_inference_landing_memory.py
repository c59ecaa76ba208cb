"""Blocks of a hand-off that arrive while the prompt is computed."""

from __future__ import annotations

import pytest

from forge.core.errors import ResourceExhausted
from services.inference.engines.base import KvSpan
from services.inference.engines.byte_room import ByteRoom
from services.inference.worker.landing_memory import Landing


async def test_prompt_without_memory_is_refused_alone() -> None:
    """Its room is free again."""
    block = KvSpan(
        from_token=0,
        tokens=1,
        version=1,
        dtype="float32",
        shape=(2, 2, 1, 1, 4),
        data=bytes(64),
    )
    room = ByteRoom(1 << 20)
    landing = Landing(room, from_token=0, to_token=1 << 50)
    with pytest.raises(ResourceExhausted, match="no memory for a hand-off"):
        await landing.add(block)
    landing.close()
    assert room.used_bytes == 0
