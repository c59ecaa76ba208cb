"""Saves checkpoints on a thread of its own, so that training does not wait for the disk.

Owns the thread alone, which waits for the writer process. The learner captures the contents;
`services.trainer.actors.training` decides when to save and which checkpoint counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.core.errors import Unavailable
from forge.runtime.actors.actor import ThreadActor
from forge.runtime.telemetry import log
from services.trainer import metrics
from services.trainer.checkpoint.files import Contents
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.remote_copies import RemoteCopies
from services.trainer.checkpoint.store import CheckpointStore


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCheckpoint:
    """Write a checkpoint; answered by its path once it is durable.

    Raises `ResourceExhausted` when it cannot be written.
    """

    contents: Contents
    step: int
    weight_version: int
    history: CheckpointHistory
    lineage: str
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCheckpoints:
    """Wait until every earlier write has ended; answered by the oldest step to which a rewind may
    return."""

    recorded: int = 0
    """Step of the checkpoint that the lineage's record names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune:
    """Remove the checkpoints that retention does not keep; answered like `FlushCheckpoints`."""

    recorded: int
    """Step of the checkpoint that the lineage's record names, which stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOut:
    """Copy a checkpoint to `checkpoint.copy_to`; answered once it is there, or once it has failed:
    the next one is tried again."""

    path: Path


class CheckpointWriter(ThreadActor):
    """Writes one checkpoint at a time."""

    def __init__(
        self,
        store: CheckpointStore,
        sending: Callable[[], Collection[int]],
        copies: RemoteCopies | None = None,
    ) -> None:
        """`sending` returns the steps that standbys are fetching; these stay, too. `copies` is
        needed for `CopyOut`."""
        self._store = store
        self._sending = sending
        self._copies = copies

    def receive(self, message: Any) -> Any:
        """Handles `WriteCheckpoint`, `FlushCheckpoints`, `Prune` and `CopyOut`."""
        match message:
            case WriteCheckpoint():
                return self._store.save(
                    message.contents.write,
                    step=message.step,
                    weight_version=message.weight_version,
                    history=message.history,
                    lineage=message.lineage,
                    fence=message.fence,
                )
            case FlushCheckpoints(recorded=recorded):
                return self._store.oldest_step(recorded=recorded)
            case Prune(recorded=recorded):
                self._store.prune(held={recorded, *self._sending()})
                return self._store.oldest_step(recorded=recorded)
            case CopyOut(path=path):
                self._copy_out(path)
                return None
        return super().receive(message)

    def _copy_out(self, path: Path) -> None:
        assert self._copies is not None, "checkpoint.copy_to is set"
        try:
            self._copies.put(path)
        except Unavailable as error:
            log.error("checkpoint_not_copied", path=str(path), error=str(error))
            metrics.CHECKPOINT_COPY_FAILING.set(1)
        else:
            log.info("checkpoint_copied", path=str(path))
            metrics.CHECKPOINT_COPY_FAILING.set(0)
