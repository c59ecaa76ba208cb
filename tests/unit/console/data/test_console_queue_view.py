"""The positions of the window page."""

from __future__ import annotations

from typing import Any, cast

import pytest

from forge.client.operator import Operator
from forge.core.errors import NotFound
from forge.v1 import scheduler_pb2 as pb
from services.console.data.queue_view import ALIGNED, BEFORE_HEAD, PHASES, QueueView


class Queue:
    """A scheduler with 5000 positions; the head is at 1000."""

    async def queue(
        self, *, before_head: int = 0, positions: int, first_index: int | None = None, **_: Any
    ) -> pb.GetQueueResponse:
        first = 1000 - before_head if first_index is None else first_index
        last = min(5000, first + positions)
        group = pb.QueuedGroup(queue_index=first, task_id="t", phase=pb.QUEUE_PHASE_COMPLETE)
        return pb.GetQueueResponse(
            first_index=first,
            phases=bytes([pb.QUEUE_PHASE_TRAINED]) * (last - first),
            head=1000,
            edge=2000,
            next_index=5000,
            groups=[group] if first < 4000 else [],
        )


def view() -> QueueView:
    return QueueView(cast(Operator, Queue()))


async def test_first_position_stays_while_the_head_moves() -> None:
    """It is a multiple, and far enough before the head."""
    found = await view().read()
    assert found["first"] % ALIGNED == 0
    assert 1000 - BEFORE_HEAD - ALIGNED <= found["first"] <= 1000 - BEFORE_HEAD
    assert found["first"] + len(found["phases"]) == 5000
    assert {*found["phases"]} == {"t"}


@pytest.mark.parametrize(
    ("index", "inside", "taken"), [(999, False, True), (1000, True, False), (2000, False, False)]
)
async def test_group_is_taken_inside_or_outside(index: int, inside: bool, taken: bool) -> None:
    """Complete groups below the head are taken for a batch."""
    group = await view().group(index)
    assert (group["phase"], group["inside"], group["taken"]) == ("complete", inside, taken)


async def test_position_without_a_group_is_not_found() -> None:
    """It is beyond the queue, or left the memory of the scheduler."""
    with pytest.raises(NotFound, match="position 4500"):
        await view().group(4500)


def test_each_phase_has_a_letter() -> None:
    """A new phase of the scheduler needs one here and in the page."""
    assert len({*PHASES}) == len(PHASES) == len(pb.QueuePhase.keys())
