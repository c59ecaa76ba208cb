"""The drain of one instance: its mark in discovery, and what happens without etcd."""

from __future__ import annotations

from typing import Any

import pytest

from forge.core.errors import Unavailable
from forge.runtime.process.drain import DRAINING_KEY, DrainServicer
from forge.v1 import drain_pb2 as pb


class Context:
    """A process whose etcd may be away."""

    def __init__(self) -> None:
        self.metadata = {"role": "both"}
        self.announced: list[dict[str, str]] = []
        self.away = False

    async def announce(self) -> None:
        if self.away:
            raise Unavailable("etcd is away")
        self.announced.append(dict(self.metadata))


async def test_drain_without_etcd_changes_nothing() -> None:
    """Not the metadata either, which a later announcement would publish."""
    context: Any = Context()
    servicer = DrainServicer(context, running=lambda: 2)
    context.away = True
    with pytest.raises(Unavailable):
        await servicer.SetDraining(pb.SetDrainingRequest(draining=True), None)
    assert context.metadata == {"role": "both"}
    context.away = False
    answer = await servicer.SetDraining(pb.SetDrainingRequest(draining=True), None)
    assert (answer.draining, answer.running) == (True, 2)
    assert context.announced == [{"role": "both", DRAINING_KEY: "1"}]
    context.away = True
    with pytest.raises(Unavailable):
        await servicer.SetDraining(pb.SetDrainingRequest(draining=False), None)
    assert context.metadata[DRAINING_KEY] == "1"
