"""Orders of rank 0 to the ranks that hold segments of a version, beside training.

Owns their transport, through the store of the group: rank 0 writes an order, each rank answers it
(`segment_server`). No rank waits in a collective, so training continues. Rank 0 announces a version
once all ranks have answered that they serve it; a rank that is lost before ends the publication,
and the version before stays announced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from forge.core.errors import ForgeError, ResourceExhausted, Unavailable
from services.trainer import metrics
from services.trainer.published.segments import RankSegment

LOOK_S = 0.05
T = TypeVar("T")


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by the segment of the copy with this number."""

    number: int


class Serve(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send the copy with this number as a version."""

    number: int
    version: int


class Keep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Drop all other versions."""

    versions: list[int]


class Write(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write the segment of a version into a file of all tensors."""

    version: int
    path: str
    aligned_bytes: int
    """Alignment of the first byte of each tensor."""
    mapped: bool
    """The file is shared memory: send the tensors from there."""


SegmentOrder = Describe | Serve | Keep | Write


class SegmentAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of one rank to one order."""

    error: str = ""
    segment: RankSegment | None = None
    sent_bytes: int = 0
    """Data of weights that the rank has sent so far."""


class SegmentRanks:
    """Rank 0's end; its methods are those of `OtherRanks`."""

    def __init__(self, store: Store, *, ranks: int, lost: Callable[[], str]) -> None:
        """`lost` returns why a rank will not answer, or ""."""
        self._store = store
        self._ranks = range(1, ranks)
        self._lost = lost
        self._orders = 0
        self._copies = 0
        self._sent_bytes = dict.fromkeys(self._ranks, 0)
        self._turn = asyncio.Lock()

    def new_copy(self) -> int:
        """Count a copy of the weights and return its number."""
        self._copies += 1
        return self._copies

    async def described(self, number: int) -> Sequence[RankSegment]:
        """See `OtherRanks`."""
        answers = await self._order(Describe(number=number))
        return [one.segment for one in answers if one.segment is not None]

    async def serve(self, number: int, version: int) -> None:
        """See `OtherRanks`."""
        await self._order(Serve(number=number, version=version))

    async def keep(self, versions: Collection[int]) -> None:
        """See `OtherRanks`."""
        await self._order(Keep(versions=list(versions)))

    async def write(self, version: int, path: Path, *, aligned_bytes: int, mapped: bool) -> None:
        """See `OtherRanks`."""
        place = str(path.absolute())
        await self._order(
            Write(version=version, path=place, aligned_bytes=aligned_bytes, mapped=mapped),
            refused=ResourceExhausted,
        )

    async def _order(
        self, order: SegmentOrder, *, refused: type[ForgeError] = Unavailable
    ) -> list[SegmentAnswer]:
        async with self._turn:
            self._orders += 1
            keys = [answer_key(self._orders, rank) for rank in self._ranks]
            key = order_key(self._orders)
            await self._call(self._store.set, key, msgspec.json.encode(order).decode())
            while not await self._call(self._store.check, keys):
                if because := self._lost():
                    raise Unavailable(f"no rank serves a segment of the weights: {because}")
                await asyncio.sleep(LOOK_S)
            answers = await self._call(self._answers, keys)
            # All have read it: they have answered.
            await self._call(self._forget, [key, *keys])
        if errors := [one.error for one in answers if one.error]:
            raise refused(errors[0])
        return answers

    async def _call(self, call: Callable[..., T], *arguments: object) -> T:
        """Raises `Unavailable` when the store has ended."""
        try:
            return await asyncio.to_thread(call, *arguments)
        except RuntimeError as error:
            raise Unavailable(f"the store of the ranks does not answer: {error}") from error

    def _answers(self, keys: Sequence[str]) -> list[SegmentAnswer]:
        answers = [msgspec.json.decode(self._store.get(key), type=SegmentAnswer) for key in keys]
        for rank, answer in zip(self._ranks, answers, strict=True):
            sent_bytes = answer.sent_bytes - self._sent_bytes[rank]
            metrics.WEIGHT_SENT_BYTES.labels(str(rank)).inc(sent_bytes)
            self._sent_bytes[rank] = answer.sent_bytes
        return answers

    def _forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete_key(key)


def order_key(number: int) -> str:
    """The key of an order."""
    return f"segments/{number}"


def answer_key(number: int, rank: int) -> str:
    """The key of a rank's answer."""
    return f"segments/{number}/{rank}"
