"""Errors of steps: those that are retried, and those that end the process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from forge.core.errors import (
    ActorStopped,
    ConfigError,
    DeadlineExceeded,
    FailedPrecondition,
    ForgeError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from services.trainer import training_loop
from services.trainer.learner.rank_processes import RankFailed, RankGone
from services.trainer.training_loop import MOST_EQUAL_FAILURES, StepFailed, TrainingLoop

CALLS = 4 * MOST_EQUAL_FAILURES


class Training:
    """Raises the errors in order, then stops; an int in their place is a committed step."""

    def __init__(self, *outcomes: Exception | int) -> None:
        self._left = list(outcomes)
        self.record: Any = SimpleNamespace(step=0)

    async def ask(self, message: object, *, timeout_s: float) -> bool:
        if not self._left:
            raise ActorStopped("the end")
        outcome = self._left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        self.record.step = outcome
        return True


async def failure_of(monkeypatch: pytest.MonkeyPatch, *outcomes: Exception | int) -> Any:
    """The failure that ends the process; None without one."""
    monkeypatch.setattr(training_loop, "_RETRY_S", 0.0)
    failures: list[BaseException] = []

    async def hold(message: object, *, timeout_s: float) -> None: ...

    context: Any = SimpleNamespace(fail=lambda name, error: failures.append(error))
    training: Any = Training(*outcomes)
    steering: Any = SimpleNamespace(ask=hold)
    versions: Any = SimpleNamespace(hold=SimpleNamespace(automatic=False))
    loop = TrainingLoop(
        context,
        training,
        steering,
        record=training.record,
        versions=versions,
        canaries=False,
    )
    await asyncio.wait_for(loop._advancing, 30)
    await loop.stop()
    assert len(failures) < 2
    return failures[0] if failures else None


@pytest.mark.parametrize(
    "error",
    [
        IndexError("index out of range in self\nof torch"),
        RankFailed("rank 1 failed: TypeError: no"),
        InvalidArgument("a turn has 9 tokens, the budget 8"),
    ],
)
async def test_step_that_always_ends_with_one_error_ends_the_process(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one line, which has step, error and place."""
    failure = await failure_of(monkeypatch, 6, *[error] * MOST_EQUAL_FAILURES)
    assert type(failure) is StepFailed and "\n" not in str(failure)
    said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]} (test_trainer_training"
    assert str(failure).startswith(f"step 7 failed 3 times in a row: {said}")


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("pool s0 is away"),
        ResourceExhausted("the disk is full"),
        DeadlineExceeded("no answer"),
        NotFound("no such batch"),
        FailedPrecondition("another trainer"),
        PermissionDenied("a key is changed"),
        ForgeError("internal error; the service's log has the cause"),
        RankGone("rank 1 failed: killed by SIGKILL"),
    ],
)
async def test_no_error_of_a_peer_ends_the_process(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is retried until the peer is back."""
    assert await failure_of(monkeypatch, *[error] * CALLS) is None


async def test_steps_and_other_errors_begin_the_count_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only one error, again and again, is without remedy."""
    outcomes: list[Exception | int] = []
    for number in range(CALLS):
        outcomes += [KeyError(number // 2), number // 2]
    assert await failure_of(monkeypatch, *outcomes) is None


async def test_wrong_setting_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is the process's."""
    error = ConfigError("objective.algorithm failed")
    assert await failure_of(monkeypatch, error) is error
