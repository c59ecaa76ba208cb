"""Writes checkpoints on a thread of its own, so that training does not wait for the disk.

Owns the thread alone. The learner captures the contents; `services.trainer.actors.training`
decides when to save and which checkpoint counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.runtime.actors.actor import ThreadActor
from services.trainer.checkpoint.files import Contents
from services.trainer.checkpoint.history import History
from services.trainer.checkpoint.store import CheckpointStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Write a checkpoint; answered by its path once it is durable.

    Raises `ResourceExhausted` when it cannot be written.
    """

    contents: Contents
    step: int
    weight_version: int
    history: History
    lineage: str
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Wait until every earlier write has ended; answered by the oldest step to which a rewind may
    return."""

    recorded: int = 0
    """Step of the checkpoint that the lineage's record names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune:
    """Remove the checkpoints that retention does not keep; answered like `Flush`."""

    recorded: int
    """Step of the checkpoint that the lineage's record names, which stays."""


class CheckpointWriter(ThreadActor):
    """Writes one checkpoint at a time."""

    def __init__(
        self, store: CheckpointStore, sending: Callable[[], Collection[int]] = frozenset
    ) -> None:
        """`sending` returns the steps that standbys are fetching; these stay, too."""
        self._store = store
        self._sending = sending

    def receive(self, message: Any) -> Path | int:
        """Handles `Write`, `Flush` and `Prune`."""
        match message:
            case Write():
                return self._store.save(
                    message.contents.write,
                    step=message.step,
                    weight_version=message.weight_version,
                    history=message.history,
                    lineage=message.lineage,
                    fence=message.fence,
                )
            case Flush(recorded=recorded):
                return self._store.oldest_step(recorded=recorded)
            case Prune(recorded=recorded):
                self._store.prune(held={recorded, *self._sending()})
                return self._store.oldest_step(recorded=recorded)
        raise NotImplementedError(f"CheckpointWriter handles no {type(message).__name__}")
