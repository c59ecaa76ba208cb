"""A scheduler and a pool, for trainers of several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.trainer.process import ranks_of
from tests.support.trainer.stack import Stack, trainer_stack

stack = trainer_stack


@pytest.fixture
def ended_ranks(stack: Stack) -> Iterator[None]:
    """Leaves no rank of torchrun behind."""
    yield
    process = stack.trainer.process
    if process is not None:
        started = ranks_of(stack.trainer)
        process.kill()  # first: it would restart the ranks, which hold its stderr open
        for each in started.values():
            each.kill()
