"""The learner: owns model and optimizer, on a thread of its own.

Takes optimizer steps, and copies the weights for publication and checkpoints. The model is a
`services.trainer.learner.model_replica`, one per rank. `services.trainer.actors.training` decides
what to do when.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge.runtime.actors.actor import ThreadActor
from forge.runtime.telemetry import log
from services.trainer.batches.reading import ReadBatch
from services.trainer.checkpoint.files import Contents, named_tensors
from services.trainer.checkpoint.reading import UNREADABLE, read_published
from services.trainer.checkpoint.store import Checkpoint, CheckpointStore
from services.trainer.config import TrainerConfig
from services.trainer.learner.expected_memory import log_expected_memory
from services.trainer.learner.model_replica import (
    Adopt,
    Capture,
    Examine,
    ModelReplica,
    Order,
    OwnTrees,
    ReadPublished,
    StartOver,
    Take,
    TakeRead,
)
from services.trainer.learner.rank_processes import Ranks
from services.trainer.learner.reading_ranks import DataGroupReaders, ReadChannel
from services.trainer.published.publisher import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """Copy the current weights for publication; answered by a Snapshot.

    After a restore, and with `checkpoint`, the tensors are those of the kept model's files. Raises
    `DataLoss` when these are damaged.
    """

    step: int
    checkpoint: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Restore the newest checkpoint, which is the answer; without one start over, answer None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeRoutes:
    """Answered by the shape of the routes that the policy replays; None if it replays none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReaders:
    """A batch could not be read because a rank is lost: start the ranks again if so."""


class LearnerActor(ThreadActor):
    """Trains one policy."""

    def __init__(
        self,
        config: TrainerConfig,
        checkpoints: CheckpointStore,
        readers: DataGroupReaders | None = None,
    ) -> None:
        """`readers` are needed with `read_from = "ranks"`."""
        self._config = config
        self._readers = readers
        self._checkpoints = checkpoints
        self._ranks: Ranks | None = None
        self._kept: Mapping[str, Tensor] = {}
        """Published tensors of the restored checkpoint, until the next step."""

    def started(self) -> None:
        """Starts the other ranks, builds the model and checks it."""
        torch.set_num_threads(self._config.threads())
        log_expected_memory(self._config)
        try:
            if self._config.mesh_shape.ranks > 1:
                self._ranks = Ranks(self._config)
            self._replica = ModelReplica(
                self._config,
                world=self._ranks.world if self._ranks else None,
                trees=self._own_trees(),
            )
            self._check_checkpoint()
            self._replica.check()
        except BaseException:
            self.stopped()
            raise

    def _own_trees(self) -> OwnTrees | None:
        """Connects the readers to these ranks; None: rank 0 reads all."""
        groups = self._ranks.reading if self._ranks is not None else None
        if groups is None or groups.firsts is None or self._readers is None:
            return None
        self._readers.connect(ReadChannel(groups.firsts))
        return OwnTrees(taken=self._readers.own.taken, peers=groups.peers)

    def stopped(self) -> None:
        """Ends the other ranks."""
        if self._readers is not None:
            self._readers.connect(None)
        if self._ranks is not None:
            self._ranks.close()

    def receive(self, message: Any) -> Any:
        """Handles `Take`, `TakeSnapshot`, `Capture`, `Restore`, `DescribeRoutes` and
        `CheckReaders`."""
        match message:
            case Take(plan=ReadBatch(number=batch), weight_version=version, keep=keep):
                self._kept = {}
                return self._order(TakeRead(batch=batch, weight_version=version, keep=keep))
            case Take():
                self._kept = {}
                return self._order(message)
            case CheckReaders():
                return self._check_readers()
            case TakeSnapshot(step=step, checkpoint=checkpoint):
                kept = read_published(checkpoint) if checkpoint else self._kept
                return self._snapshot(step, kept)
            case Capture():
                return self._capture()
            case Restore():
                return self._restore()
            case DescribeRoutes():
                return self._replica.route_shape
        return super().receive(message)

    def _check_readers(self) -> None:
        """Raises `RankFailed`, which starts the ranks again, if one does not read any more."""
        if self._readers is not None and self._ranks is not None and self._readers.broken:
            self._ranks.fail(self._readers.broken)

    def _reading(self, order: Order) -> Any:
        """Read the weights, together with the other ranks if each has a part of them."""
        if self._ranks is not None and self._ranks.world.shape.sharded:
            return self._order(order)
        return self._replica.obey(order)

    def _order(self, order: Order) -> Any:
        if self._ranks is None:
            return self._replica.obey(order)
        if isinstance(order, Take) and (parts := self._replica.parts(order)):
            self._ranks.send_parts(parts)
        else:
            self._ranks.send(order)
        with self._ranks.together():
            return self._replica.obey(order)

    def _snapshot(self, step: int, kept: Mapping[str, Tensor]) -> Snapshot:
        """The `kept` tensors if they have the names and type of this run, else those in memory."""
        probe_only = self._replica.publishes(kept)
        # The kept model is in files that rank 0 maps: it sends all of it.
        others = None if probe_only or self._ranks is None else self._ranks.segments
        number = others.new_copy() if others is not None else 0
        read, probe = self._reading(ReadPublished(probe_only=probe_only, number=number))
        return Snapshot(
            step=step,
            tensors=named_tensors(kept if probe_only else read),
            probe=probe,
            aliases=self._replica.tied_names(),
            hub=self._replica.hub_parts,
            others=others,
            number=number,
        )

    def _capture(self) -> Contents:
        """The contents of a checkpoint, which the ranks write together if each has a part."""
        if self._ranks is None or not self._ranks.world.shape.sharded:
            contents: Contents = self._replica.obey(Capture())
            return contents
        shared = self._ranks.new_save()
        contents = self._order(Capture(number=shared.number))
        return replace(contents, others=shared)

    def _restore(self) -> Checkpoint | None:
        for checkpoint in self._checkpoints.newest_first():
            kept = self._intact(checkpoint)
            if kept is None:
                self._checkpoints.set_aside(checkpoint)
                continue
            self._order(Adopt(directory=checkpoint.path))
            self._kept = kept
            log.info("checkpoint_restored", path=str(checkpoint.path), step=checkpoint.step)
            return checkpoint
        if self._replica.steps:
            self._kept = {}
            self._order(StartOver())
        return None

    def _intact(self, checkpoint: Checkpoint) -> dict[str, Tensor] | None:
        """The published tensors of a checkpoint; None if one of its files is damaged.

        Raises `ConfigError` for a checkpoint of another run.
        """
        try:
            kept = read_published(checkpoint.path)
            self._replica.state.fits(checkpoint.path)
        except UNREADABLE as error:
            log.error("checkpoint_damaged", path=str(checkpoint.path), error=repr(error))
            return None
        if self._reading(Examine(directory=checkpoint.path)):
            log.error(
                "checkpoint_damaged", path=str(checkpoint.path), error="a rank found a damaged file"
            )
            return None
        return kept

    def _check_checkpoint(self) -> None:
        """Raises `ConfigError` at the start when the newest readable checkpoint is of another run;
        the restore handles damaged ones."""
        for checkpoint in self._checkpoints.newest_first():
            try:
                self._replica.state.fits(checkpoint.path)
            except UNREADABLE:
                continue
            return
