"""The writer: the one actor that changes a shard, on a thread of its own.

Owns the grouping of commands into commits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from forge.core.errors import ForgeError
from forge.runtime.actors.actor import ThreadActor
from forge.runtime.rpc.chunks import chunked
from forge.runtime.telemetry import log
from services.pool.data.commands import AppendTurns, Command, cost_bytes
from services.pool.metrics import (
    COMMANDS,
    COMMIT_FAILURES,
    COMMIT_SECONDS,
    COMMITTED_BYTES,
    DISK_FREE_BYTES,
    LIVE_BYTES,
    REFUSALS,
    USED_BYTES,
)
from services.pool.store import PoolStore

COMMIT_BYTES = 8 << 20
"""Most payload of one commit; a single command may exceed it."""


class WriterRef(Protocol):
    """The writer, or a gate before it."""

    async def ask(self, message: Any, *, timeout_s: float) -> Any:
        """Returns the writer's answer to a command."""


class Writer(ThreadActor):
    """Answers each `Command` once it is on disk."""

    # One fsync for all commands within 2 ms: 29k durable records a second instead of 4k. 64 turns
    # are committed at once; later ones make the next commit.
    batch_size: ClassVar[int] = 64
    batch_wait_s: ClassVar[float] = 0.002

    def __init__(self, store: PoolStore) -> None:
        self._store = store

    def weigh(self, message: Any) -> int:
        """Counts the turns of a command; any other command counts as one."""
        return len(message.turns) if isinstance(message, AppendTurns) else 1

    def receive_batch(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Commits the commands in order; one answer each."""
        answers: list[Any] = []
        for commands in chunked(messages, size_of=cost_bytes, max_bytes=COMMIT_BYTES):
            answers += self._commit(commands)
        return answers

    def _commit(self, commands: Sequence[Command]) -> list[Any]:
        started_s = time.perf_counter()
        try:
            answers = self._store.commit(commands)
        except ForgeError as error:
            # The whole commit was refused for lack of room: each sender may retry.
            log.warning("commit_refused", commands=len(commands), error=str(error))
            COMMIT_FAILURES.labels(error.code).inc()
            return [error] * len(commands)
        COMMIT_SECONDS.observe(time.perf_counter() - started_s)
        for command, answer in zip(commands, answers, strict=True):
            _count_refusals(command, answer)
            COMMANDS.labels(type(command).__name__).inc()
            COMMITTED_BYTES.inc(cost_bytes(command))
        environment = self._store.environment
        USED_BYTES.set(environment.used_bytes)
        LIVE_BYTES.set(environment.live_bytes)
        DISK_FREE_BYTES.set(environment.disk_free_bytes)
        return answers


def _count_refusals(command: Command, answer: Any) -> None:
    # Each turn has an answer, unless there was no room for any.
    answers = answer if isinstance(answer, tuple) else (answer,)
    for answer in answers:
        if isinstance(answer, ForgeError):
            REFUSALS.labels(type(command).__name__, answer.code).inc()
