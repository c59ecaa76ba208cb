"""A router actor over a discovery that the test writes, and a clock that it moves."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from forge.runtime.coordination import Instance
from services.inference.router.actor import RouterActor
from services.inference.router.fleet.fleet import Fleet
from services.inference.router.fleet.versions import Versions
from services.inference.router.fleet.workers import Worker
from services.inference.router.messages import FleetChanged, PlacePrefill, Prefilled


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def announced(
    name: str, role: str, /, *, version: int = 1, address: str = "", **metadata: str
) -> Instance:
    return Instance(
        instance_id=name,
        kind=role,
        revision=1,
        address=address or f"{name}:1",
        metadata={
            "weight_version": str(version),
            "block_tokens": "4",
            "cache_tokens": "400",
            "capacity": "8",
            **metadata,
        },
    )


PROMPT = ids(*range(40))
OTHER = ids(*range(100, 140))


class Clock:
    """A clock that stands still until told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def present(address: str) -> None:
    """Every worker answers."""


class Harness:
    """A RouterActor over a discovery that the test writes."""

    def __init__(
        self,
        *workers: Instance,
        queue_limit: int = 4,
        **rules: Any,
    ) -> None:
        """`rules`: fields of the fleet."""
        self.clock = Clock()
        self._prefill = SimpleNamespace(kind="prefill", instances=())
        self._decode = SimpleNamespace(kind="decode", instances=())
        discoveries: list[Any] = [self._prefill, self._decode]
        self.actor = RouterActor(
            discoveries,
            queue_limit=queue_limit,
            ping=present,
            clock=self.clock,
            fleet=Fleet(versions=Versions(wait_s=10), **rules),
            on_workers=self._keep,
        )
        self._show(workers)

    def _keep(self, workers: Iterable[Worker]) -> None:
        self.workers = list(workers)

    def _show(self, workers: Sequence[Instance]) -> None:
        self._prefill.instances = tuple(w for w in workers if w.kind == "prefill")
        self._decode.instances = tuple(w for w in workers if w.kind == "decode")

    async def change(self, *workers: Instance) -> None:
        self._show(workers)
        await self.actor.receive(FleetChanged())

    async def prefill(self, prompt: bytes) -> str:
        """Places and completes a prefill; where it went."""
        placement = await self.actor.receive(PlacePrefill(ids=prompt))
        done = Prefilled(placement=placement, ids=prompt, cached_tokens=0, prefill_s=0.01)
        await self.actor.receive(done)
        return str(placement.worker.instance_id)


DECODE = announced("d", "decode")


async def harness(*workers: Instance, **options: Any) -> Harness:
    made = Harness(*workers, **options)
    await made.actor.started()
    return made


def both(name: str, *, draining: bool = False) -> Instance:
    drain = {"draining": "1"} if draining else {}
    one = announced(name, "decode", role="both", cache_tokens="8000")
    return replace(one, metadata={**one.metadata, **drain})
