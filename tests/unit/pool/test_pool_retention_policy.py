"""Which groups are due to be freed, and which steps the trainers' checkpoints cover."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import Unavailable
from forge.runtime.rpc.remote import Remote
from forge.v1 import trainer_pb2
from services.pool.retention import RetentionPolicy
from services.pool.storage.groups.settled_index import SettledGroup
from services.pool.trainer_status import covered_step

settled = st.builds(
    SettledGroup,
    key=st.just(b"k"),
    task_id=st.just("task"),
    settled_unix_s=st.floats(0, 1e9),
    step=st.integers(0, 100),
)


@given(settled, st.integers(0, 100), st.floats(0, 2e9), st.floats(0, 1e9), st.booleans())
def test_uncovered_group_is_never_due(group, covered_step, now_unix_s, keep_age_s, pressed):
    """For any age, size and pressure."""
    policy = RetentionPolicy(keep_age_s=keep_age_s, keep_bytes=1)
    due = policy.due(group, covered_step=covered_step, now_unix_s=now_unix_s, pressed=pressed)
    assert not due or group.step <= covered_step


@dataclass(frozen=True)
class Trainer:
    """Stands in for an instance and its stub; silent without a step."""

    step: int | None
    instance_id: str = "trainer"

    async def GetTrainerStatus(self, request, *, timeout: float):
        if self.step is None:
            raise Unavailable("the trainer is gone")
        return trainer_pb2.GetTrainerStatusResponse(oldest_checkpoint_step=self.step)


@dataclass(frozen=True)
class Trainers(Remote[Any]):
    """Stands in for a Remote."""

    steps: tuple[int | None, ...]

    def instances(self) -> tuple[Any, ...]:
        return tuple(map(Trainer, self.steps))

    def stub(self, instance: Any) -> Any:
        return instance


@pytest.mark.parametrize(
    ("steps", "covered"), [((), 0), ((7,), 7), ((7, 5), 5), ((7, 0), 0), ((7, None), 0)]
)
async def test_slowest_trainer_decides_the_coverage(steps, covered):
    """No trainer, one without a checkpoint and one that does not answer cover nothing."""
    assert await covered_step(Trainers(steps)) == covered
