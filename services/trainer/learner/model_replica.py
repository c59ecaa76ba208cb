"""One copy of model and optimizer: each rank of the learner holds one.

Owns its construction from settings and the execution of orders: `services.trainer.actors.learner`
gives them, `services.trainer.learner.rank_processes` sends them to the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.core.errors import ConfigError, InvalidArgument
from forge.core.named_tensor import HubParts
from forge.core.routes import RouteShape
from forge.rl.device import device_of
from forge.rl.learner.batch_plan import BatchPlan
from forge.rl.learner.group_plans import GroupPlan, group_plans
from forge.rl.learner.learner import Learner
from forge.rl.learner.own_plans import joined_plan
from forge.rl.learner.tree_tokens import Reference
from forge.rl.learner.types import StepResult
from forge.rl.model.policy import TreePolicy
from forge.rl.model.probe import as_sample, check_policy, own_logprobs
from forge.rl.model.served_weights import ServedValues
from forge.rl.parallel.world import World, whole
from forge.runtime.weights import WeightProbe
from forge.runtime.weights.segments import cut
from services.trainer.batches.reading import ReadBatch
from services.trainer.checkpoint.reading import read_heads
from services.trainer.config import TrainerConfig
from services.trainer.learner.publication_probe import EXACT_EVERY, make_probe
from services.trainer.learner.replica_checkpoint import ReplicaCheckpoint
from services.trainer.learner.sharded_start import empty_model, fill_shards, place, without_weights
from services.trainer.memory_plan import MOMENTS
from services.trainer.model.full_weights import Trainee, hub_parts, load_model
from services.trainer.model.host_copies import host_copies
from services.trainer.model.lora import LoraTrainee
from services.trainer.model.placement import (
    backbone_dtype,
    compile_for_trees,
    local_rank,
    recompute,
)
from services.trainer.model.teacher import check_teacher

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOver:
    """Load the starting weights and reset the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """Restore a checkpoint."""

    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Examine:
    """Compare the files of a checkpoint with their digests, each rank a share of them; answered by
    the number of ranks that found damage."""

    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPublished:
    """Copy the published tensors to host memory; answered by (tensors, probe)."""

    probe_only: bool = False
    """Answer without tensors."""
    number: int = 0
    """Number of this copy if each rank keeps its segment; 0: rank 0 keeps all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Copy the state that a checkpoint holds to host memory, each rank its shards; answered by the
    Contents of this rank."""

    number: int = 0
    """Number of this capture among those of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Take one step on a batch; answered by a StepResult."""

    plan: BatchPlan | ReadBatch
    """If it has no trees, the rank plans them itself."""
    weight_version: int
    keep: tuple[int, ...] = ()
    """Numbers of the samples whose token values are in the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakePart:
    """Compute one data group's part of a step on a batch; answered by a StepResult."""

    part: GroupPlan
    weight_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeRead:
    """Take one step on a batch that the ranks have read; answered by a StepResult."""

    batch: int
    """Number of the batch."""
    weight_version: int
    keep: tuple[int, ...] = ()
    """The field of `Take`; rank 0 alone needs it."""


Order = StartOver | Adopt | Take | TakePart | TakeRead | Examine | ReadPublished | Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTrees:
    """Source of a rank's trees in a batch that the ranks have read."""

    taken: Callable[[int], Sequence[BatchPlan]] | None
    """Returns the plan of each update of a batch; None on ranks that do not read."""
    peers: dist.ProcessGroup | None
    """All ranks of the data group, if there are several."""


class ModelReplica:
    """Model and optimizer of one rank. Not thread-safe."""

    def __init__(
        self, config: TrainerConfig, *, world: World | None, trees: OwnTrees | None
    ) -> None:
        """Begins with the starting weights. The ranks of `world` must get the same orders; `trees`
        are needed for `TakeRead`.

        Raises `ConfigError` for a device that does not exist, and for a model that cannot be
        sharded.
        """
        self._config = config
        self._world = world or World()
        self._trees = trees
        self._model_path = Path(config.model_path)
        self._device = device_of(config.device, rank=local_rank(self._world.rank))
        self._probes = 0
        self._start_over()

    @property
    def steps(self) -> int:
        """Optimizer steps since the starting weights."""
        return self._learner.steps

    @property
    def route_shape(self) -> RouteShape | None:
        """Shape of the routes that the policy replays; None if it replays none."""
        replay = self._learner.policy.replay
        return None if replay is None else replay.shape

    @property
    def published_type(self) -> torch.dtype:
        """Type of the published tensors; `auto` is the type in which the model computes."""
        return self._published_type(self._learner.policy)

    def _published_type(self, policy: TreePolicy) -> torch.dtype:
        if self._config.publish_dtype == "auto":
            return policy.autocast or torch.float32
        return DTYPES[self._config.publish_dtype]

    def check(self) -> None:
        """Compare merged trees with the model's own forward, before training.

        Raises `ConfigError` for a model that cannot be trained, or not on several ranks, and
        without room for its checkpoints.
        """
        self.state.require_room(moment_bytes=MOMENTS[self._config.optimizer.name])
        for name, policy in self._policies.items():
            try:
                check_policy(policy)
            except InvalidArgument as error:
                raise ConfigError(f"{name}: {error}") from error
            self._check_sharing(policy)
        if self._teacher is not None:
            check_teacher(
                self._teacher,
                self._learner.policy,
                teacher_path=Path(self._config.teacher_path),
                model_path=self._model_path,
            )

    def _check_sharing(self, policy: TreePolicy) -> None:
        """Ranges of a tree, and parts of layers, need merged trees."""
        shape = self._world.shape
        for name, count in (("cp", shape.cp), ("tp", shape.tp)):
            if policy.undividable and count > 1:
                raise ConfigError(
                    f"mesh.{name} = {count} is not allowed for {policy.family}: "
                    f"{policy.undividable}. Use mesh.dp_shard"
                )

    def obey(self, order: Order) -> Any:
        """Carry out an order."""
        match order:
            case StartOver():
                self._start_over()
                return self.check()
            case Adopt(directory=directory):
                return self.state.adopt(directory)
            case Examine(directory=directory):
                return self.state.examine(directory)
            case Take():
                return self._take(order)
            case TakePart(part=part, weight_version=weight_version):
                return self._learner.step(part.plan(), weight_version=weight_version)
            case TakeRead():
                return self._take_read(order)
            case ReadPublished(probe_only=probe_only, number=number):
                copies = {} if probe_only else dict(self.published(divided=number > 0))
                return copies, self.probe()
            case Capture():
                return self.state.captured()

    def _start_over(self) -> None:
        torch.manual_seed(self._config.seed)
        path, lora = self._model_path, self._config.lora
        model = self._load(path)
        self._trainee = LoraTrainee(model, lora, model_path=path) if lora.rank else Trainee(model)
        if self._config.recompute_activations:
            recompute(model, share=self._config.recompute_share)
        policy = self._policy(model, path, balance_coef=self._config.balance_coef)
        self._trainee.begin(self._config.seed)
        if self._config.compile_layers:
            compile_for_trees(model, autocast=policy.autocast)
        if self._config.routing_replay.enabled:
            self._replay_routes(policy)
        reference = self._reference(policy)
        self._teacher = self._load_teacher()
        paths = {
            f"model_path = {str(path)!r}": policy,
            f"reference_path = {self._config.reference_path!r}": reference,
            f"teacher_path = {self._config.teacher_path!r}": self._teacher,
        }
        self._policies = {name: one for name, one in paths.items() if isinstance(one, TreePolicy)}
        # Some ranks draw numbers while they load; new heads must be the same on all.
        torch.manual_seed(self._config.seed)
        self._learner = Learner(
            policy,
            self._config.learner(),
            reference=reference,
            teacher=self._teacher,
            served=self._served(policy),
        )
        self.state = ReplicaCheckpoint(
            self._trainee,
            self._learner,
            world=self._world,
            published_type=self.published_type,
            model_path=self._model_path,
        )
        if self._learner.mtp and (heads := read_heads(self._model_path)):
            self._learner.mtp.heads.load_tensors(heads)

    def _load(self, path: Path) -> Any:
        """The model in a directory, in host memory; without weights yet if the world shards it."""
        return empty_model(path) if self._world.shape.sharded else load_model(path)

    def _policy(self, model: Any, path: Path, *, balance_coef: float = 0.0) -> TreePolicy:
        autocast = backbone_dtype(self._config.autocast, self._device)
        place(model, path, device=self._device, autocast=autocast)
        policy = TreePolicy(model, autocast=autocast, balance_coef=balance_coef)
        try:
            policy.spread(self._world, narrow=self._narrow(policy))
        except InvalidArgument as error:
            raise ConfigError(f"model_path = {str(path)!r}: {error}") from error
        if without_weights(model):
            fill_shards(model, path, self._world, self._device)
        return policy

    def _replay_routes(self, policy: TreePolicy) -> None:
        """Raises `ConfigError` for a model that cannot."""
        ids = as_sample(list(range(min(4, policy.vocabulary))))
        try:
            policy.replay_routes(lambda: own_logprobs(policy.model, ids))
        except InvalidArgument as error:
            raise ConfigError(
                f"routing_replay.enabled = True is not allowed for this model: {error}"
            ) from error

    def _narrow(self, policy: TreePolicy) -> torch.dtype | None:
        """The type in which layers are gathered. One of 16 bits rounds norms, too, which only a
        step on the published weights allows; adapters are merged before they are published."""
        published = self._published_type(policy)
        adapters = isinstance(self._trainee, LoraTrainee)
        return policy.autocast if policy.autocast == published and not adapters else None

    def _served(self, policy: TreePolicy) -> ServedValues | None:
        """None for float32 and for adapters, whose own values are not published."""
        published = self._published_type(policy)
        if published == torch.float32 or isinstance(self._trainee, LoraTrainee):
            return None
        return ServedValues(policy.model, published=published, autocast=policy.autocast)

    def _reference(self, policy: TreePolicy) -> Reference | None:
        """A frozen copy of the model; adapters need none, since their base is in memory."""
        if not self._config.objective.kl_coef:
            return None
        path = Path(self._config.reference_path or self._model_path)
        if isinstance(self._trainee, LoraTrainee) and path == self._model_path:
            return self._trainee.base_reference(policy)
        return self._policy(self._load(path).requires_grad_(False), path)

    def _load_teacher(self) -> TreePolicy | None:
        if not self._config.teacher_path:
            return None
        path = Path(self._config.teacher_path)
        return self._policy(self._load(path).requires_grad_(False), path)

    def parts(self, order: Take) -> list[TakePart]:
        """The order of each data group, which then gets its own trees alone; none if the groups
        need the samples of all, to retry a batch after a shortage of memory."""
        if not self._world.shape.sharded or isinstance(order.plan, ReadBatch):
            return []
        parts = group_plans(order.plan, self._learner.policy)
        return [TakePart(part=one, weight_version=order.weight_version) for one in parts]

    def _take(self, order: Take) -> StepResult:
        plan = order.plan
        assert isinstance(plan, BatchPlan), "the order of a read batch is `TakeRead`"
        assert plan.route_shape == self.route_shape, "the plan has the experts to replay"
        if not plan.trees:  # with the same budget all ranks plan the same trees
            plan = self._learner.plan(plan.samples, token_budget=plan.token_budget)
        return self._learner.step(plan, weight_version=order.weight_version, keep=order.keep)

    def _take_read(self, order: TakeRead) -> StepResult:
        assert self._trees is not None, "ranks have read a batch"
        own = self._trees.taken(order.batch) if self._trees.taken is not None else None
        plan = joined_plan(own, self._learner.policy, peers=self._trees.peers)
        return self._learner.step(plan, weight_version=order.weight_version, keep=order.keep)

    def published(self, *, divided: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Copies of the published tensors in host memory, complete at the end: all on rank 0, or on
        each rank those of its segment. If the world shards them, all ranks read them."""
        everything = range(0 if self._world.rank else len(self.sizes()))
        own = self.segment() if divided else everything
        return host_copies(self._whole_tensors(own), self.published_type)

    def _whole_tensors(self, own: range) -> Iterator[tuple[str, Tensor]]:
        """Gathers one tensor after the other; no rank has more than one beside its own."""
        tensors = chain(self._trainee.published(), self._heads().items())
        for number, (name, tensor) in enumerate(tensors):
            gathered = whole(tensor.detach())
            if number in own:
                yield name, gathered

    def sizes(self) -> list[int]:
        """Bytes of each published tensor, in order."""
        shapes = [*self._trainee.shapes().values(), *(one.shape for one in self._heads().values())]
        return [shape.numel() * self.published_type.itemsize for shape in shapes]

    def segment(self) -> range:
        """Numbers of the published tensors that this rank keeps and sends."""
        return cut(self.sizes(), self._world.shape.ranks)[self._world.rank]

    def tied_names(self) -> Mapping[str, Sequence[str]]:
        """Further names of published tensors, by the published name."""
        return self._trainee.tied_names()

    @cached_property
    def hub_parts(self) -> HubParts | None:
        """See `hub_parts`; the same for all publications."""
        return hub_parts(self._model_path, self._trainee.shapes())

    @torch.no_grad()
    def probe(self) -> WeightProbe:
        """See `make_probe`. If the world shards the weights, all ranks compute it together. They
        skip the published values, for which a rank would have to gather unrounded weights."""
        policy = self._learner.policy
        exact = self._world.shape.ranks == 1 and self._probes % EXACT_EVERY == 0
        self._probes += 1
        trainee = self._trainee if exact else None
        return make_probe(policy, trainee, published=self._published_type(policy))

    def publishes(self, kept: Mapping[str, Tensor]) -> bool:
        """Whether this run publishes tensors of these names and this type; a resumed run may have
        another `publish_dtype` or other draft heads."""
        same_type = all(one.dtype == self.published_type for one in kept.values())
        return same_type and list(kept) == [*self._trainee.shapes(), *self._heads()]

    def _heads(self) -> dict[str, Tensor]:
        return self._learner.mtp.heads.named_tensors() if self._learner.mtp else {}
