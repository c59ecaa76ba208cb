"""The writer of checkpoints: the disk's time is not training's.

Owns nothing but a thread. What is written was captured by the learner; when, and what counts as
saved, is decided by `services.trainer.actors.training`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.runtime.actor import ThreadActor
from services.trainer.checkpoint.files import Contents
from services.trainer.checkpoint.history import History
from services.trainer.checkpoint.store import CheckpointStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Answered by the path, once it is durable. ResourceExhausted when it cannot be written."""

    contents: Contents
    step: int
    weight_version: int
    history: History


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Once everything asked for before is written, or has failed, answered by the oldest step
    that there is a checkpoint of."""


class CheckpointWriter(ThreadActor):
    """Writes one checkpoint after the other."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store

    def receive(self, message: Any) -> Path | int:
        match message:
            case Write():
                return self._store.save(
                    message.contents.write,
                    step=message.step,
                    weight_version=message.weight_version,
                    history=message.history,
                )
            case Flush():
                return self._store.oldest_step()
        raise NotImplementedError(f"CheckpointWriter handles no {type(message).__name__}")
