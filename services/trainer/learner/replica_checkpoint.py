"""The state of one rank's replica in checkpoints: copied for a save, and filled by a restore.

Owns which tensors state/ has and which the other files, and each rank's part of them.
`services.trainer.checkpoint` owns the files. With sharded parameters each rank saves its shards;
otherwise rank 0 saves all, since the replicas are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.core.errors import ConfigError, InvalidArgument
from forge.rl.learner.learner import Learner
from forge.rl.parallel.world import World, whole
from forge.rl.random_state import DEVICE, HOST, random_state
from forge.runtime.telemetry import log
from services.trainer.checkpoint.files import (
    LEARNER_FILE,
    LEARNER_PREFIX,
    MASTER_PREFIX,
    MODEL_FILE,
    Contents,
    mapped,
)
from services.trainer.checkpoint.reading import (
    UNREADABLE,
    MasterWeights,
    check_files,
    fill_learner,
    master_weights,
    read_learner,
)
from services.trainer.checkpoint.shards import copy_shards
from services.trainer.checkpoint.shared_memory import SharedMemory, SpareMemory, require_room
from services.trainer.checkpoint.writer_process import WriterProcess
from services.trainer.model.full_weights import OWN_DIRECTORY, Trainee
from services.trainer.model.host_copies import finish_copies, host_copy

_BASE = "base"
"""Key in the learner's file: the fingerprint of the base model that the checkpoint needs."""
_RANDOM = "random_states"
"""Key in the learner's file: the random state of each rank that had a part in the checkpoint."""


class ReplicaCheckpoint:
    """Copies the state of one replica for a checkpoint, and restores it."""

    def __init__(
        self,
        trainee: Trainee,
        learner: Learner,
        *,
        world: World,
        published_type: torch.dtype,
        model_path: Path,
    ) -> None:
        self._trainee = trainee
        self._learner = learner
        self._world = world
        self._published_type = published_type
        self._model_path = model_path
        self._shared = world.shape.sharded
        self._writer = WriterProcess()
        self._spare: SpareMemory = []
        self._rank, self._ranks = (world.rank, world.shape.ranks) if self._shared else (0, 1)
        """This rank, and the number of ranks that save together."""

    def require_room(self, *, moment_bytes: float) -> None:
        """Raises `ConfigError` if this process may not have the memory of its part of a checkpoint.
        `moment_bytes`: of the optimizer, for a weight."""
        weights = sum(one.numel() for one in self._trainee.master().values())
        if self._trainee.adapters or self._published_type != torch.float32:
            moment_bytes += torch.float32.itemsize
        published = sum(one.numel() for one in self._trainee.shapes().values())
        whole_bytes = published * self._published_type.itemsize + weights * moment_bytes
        require_room(int(whole_bytes / self._ranks))

    def captured(self) -> Contents:
        """A copy of this rank's part of the state that a checkpoint holds. If the world shards the
        state, all ranks call it."""
        contents = self._copied()
        finish_copies(self._learner.policy.device)
        return contents

    def _copied(self) -> Contents:
        memory = SharedMemory(self._spare, pinned=self._learner.policy.device.type == "cuda")
        model, owners = self._own_part(memory)
        files = _model_files(owners, self._ranks)
        adapters = self._trainee.adapters
        learner = {**self._learner.state_dict(), _RANDOM: self._random_states()}
        master = {} if adapters else self._trainee.master()
        if self._published_type == torch.float32:
            # Master and published weights are equal: the optimizer resumes from the same file.
            master = {}
            learner["mtp"] = {key: one for key, one in learner["mtp"].items() if key != "heads"}
        tensors = {MASTER_PREFIX + name: one for name, one in master.items()}
        outline = _outline(learner, tensors)
        group = self._world.everyone if self._shared else None
        copied = partial(host_copy, empty=memory.empty)
        shards = copy_shards(tensors, group, copy=copied)
        # All ranks gather the adapters; rank 0 writes them whole, in PEFT's layout.
        gathered = {
            name: whole(one.detach())
            for name, one in (self._trainee.master() if adapters else {}).items()
        }
        part = Contents(
            model=model,
            model_file=files[self._rank],
            shards=shards,
            rank=self._rank,
            memory=memory,
            writer=self._writer,
        )
        if self._rank:
            return part
        heads = self._learner.mtp.heads.named_tensors() if self._learner.mtp else {}
        return replace(
            part,
            learner={**outline, _BASE: self._trainee.base},
            model_path=self._model_path,
            adapters={name: copied(one) for name, one in gathered.items()},
            adapter_file=self._trainee.adapter_file,
            heads={name: copied(one, self._published_type) for name, one in heads.items()},
            sidecars=self._trainee.sidecars(),
            weight_map={name: files[owner] for name, owner in owners.items()}
            if self._shared
            else {},
        )

    def _own_part(self, memory: SharedMemory) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Copies of the published tensors that this rank writes, and the rank that writes each:
        the one with the fewest bytes so far."""
        loads = [0] * self._ranks
        own, owners = {}, {}
        for name, tensor in self._trainee.published():
            gathered = whole(tensor.detach())
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += gathered.nbytes
            if owners[name] == self._rank:
                own[name] = host_copy(gathered, self._published_type, empty=memory.empty)
        return own, owners

    def _random_states(self) -> list[dict[str, Tensor]]:
        own = random_state(self._learner.policy.device)
        states: list[Any] = [own]
        if self._shared:
            states = [None] * self._ranks
            dist.all_gather_object(states, own, group=self._world.everyone)
        return states

    def fits(self, directory: Path) -> None:
        """Raises `ConfigError` when the checkpoint is of another run, and one of `UNREADABLE` when
        it is damaged."""
        master, state = self._master_in(directory), read_learner(directory, mmap=True)
        self._trainee.check(master.shapes(), base=state.get(_BASE, ""), source=master.source)
        try:
            self._learner.check_state(state)
        except InvalidArgument as error:
            source = directory / LEARNER_FILE
            raise ConfigError(f"{source}: {error}. {OWN_DIRECTORY}") from error

    def _master_in(self, directory: Path) -> MasterWeights:
        return master_weights(directory, adapters=self._trainee.adapters)

    def examine(self, directory: Path) -> int:
        """Read this rank's share of the files; returns the number of ranks that found damage."""
        damaged = 0
        try:
            check_files(self._master_in(directory), directory, rank=self._rank, ranks=self._ranks)
        except UNREADABLE as error:
            log.error("checkpoint_files_damaged", rank=self._rank, error=repr(error))
            damaged = 1
        if not self._shared:
            return damaged
        return int(self._world.total(damaged, self._learner.policy.device))

    def adopt(self, directory: Path) -> None:
        """Continue from a checkpoint; reads this rank's part of it alone. Raises `ConfigError` for
        one of another run, and one of `UNREADABLE` for a damaged one."""
        master, outline = self._master_in(directory), read_learner(directory)
        base, states = outline.pop(_BASE, ""), outline.pop(_RANDOM, [])
        self._trainee.check(master.shapes(), base=base, source=master.source)
        master.fill(self._trainee.master())
        state = self._learner.placed(outline)
        fill_learner(state, outline, directory)
        if len(states) == self._ranks:
            state.update(states[self._rank])
        self._learner.load_state_dict(state)


def _outline(learner: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The learner's state with its large tensors moved to `tensors`, and copies of the others: of
    scalars and random states."""

    def moved(path: str, tensor: Tensor) -> Tensor:
        if not tensor.ndim or path.startswith((HOST, DEVICE, _RANDOM)):
            return tensor.detach().to("cpu", copy=True)
        tensors[LEARNER_PREFIX + path] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    outline: dict[str, Any] = mapped(moved, learner)
    return outline


def _model_files(owners: Mapping[str, int], writers: int) -> list[str]:
    """The file of published tensors that each rank writes."""
    if writers == 1:
        return [MODEL_FILE]
    count = len({*owners.values()})
    return [f"model-{rank + 1:05d}-of-{count:05d}.safetensors" for rank in range(writers)]
