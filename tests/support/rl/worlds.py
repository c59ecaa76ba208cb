"""Errors of worlds of several ranks: `torchrun --nproc-per-node N -m tests.support.rl.worlds`.

Prints, on rank 0, one JSON object: {"<mesh> <case>": the largest relative error of loss, gradients
or weights}, and the parameters that a rank holds. Each case is computed by the world of every mesh
of N ranks, or of those that arguments name. `gradient` cases are compared with one sample at a time
by the model's own forward, `step` cases with a learner of one process. `tests.support.rl.ranks`
forks two ranks for some.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from forge.core.errors import InvalidArgument
from forge.core.prefix_tree import Sample
from forge.rl.config import LearnerConfig, MtpConfig, ObjectiveConfig, OptimizerConfig
from forge.rl.learner.batch_plan import BatchPlan
from forge.rl.learner.group_plans import group_plans
from forge.rl.learner.learner import Learner
from forge.rl.learner.types import StepResult
from forge.rl.model.policy import TreePolicy
from forge.rl.model.probe import as_sample, check_policy, own_logprobs
from forge.rl.model.recomputation import recompute_activations
from forge.rl.model.served_weights import ServedValues
from forge.rl.parallel.sharding import local
from forge.rl.parallel.world import World, whole
from tests.support.rl.forests import forest
from tests.support.rl.meshes import print_cases, write_cases
from tests.support.rl.models import (
    CAP,
    Gradient,
    reference_gradient,
    relative_errors,
    tiny_model,
    wide_norms,
)
from tests.support.rl.per_sample import numbered, values_error
from tests.support.rl.routed import routers_by_hand, with_routes

BALANCE = 0.1
CISPO = ObjectiveConfig(ratio_cap=CAP)
MESHES = {
    1: ["1x1x1"],
    2: ["1x2x1", "2x1x1", "1x1x2"],
    4: ["1x4x1", "2x2x1", "1x2x2", "2x1x2"],
}
"""Meshes by number of ranks: dp_replicate x dp_shard x cp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and a batch."""

    family: str = "qwen3"
    budget: int = 40
    relayed: bool = False
    adapters: tuple[str, ...] = ()
    """Layers with adapters."""
    checkpointed: bool = False
    replayed: bool = False
    """With recorded experts; those of two samples differ."""
    kv_heads: int = 2


ADAPTED = ("q_proj", "down_proj")
CASES = {
    "untied": Case(),
    "tied": Case(family="llama"),
    "windows": Case(family="gemma3"),
    "experts": Case(family="qwen3_moe"),
    "replayed experts": Case(family="qwen3_moe", budget=12, replayed=True),
    "relayed": Case(family="llama", budget=12, relayed=True),
    "relayed experts": Case(family="qwen3_moe", budget=12, relayed=True),
    "adapters": Case(family="llama", adapters=ADAPTED),
    "adapters, relayed experts": Case(
        family="qwen3_moe", budget=12, relayed=True, adapters=("all-linear",)
    ),
    "linear attention": Case(family="qwen3_next"),
    "recurrent": Case(family="falcon_h1"),
    "recurrent, checkpointed": Case(family="falcon_h1", checkpointed=True),
    "recurrent, relayed": Case(family="falcon_h1", budget=12, relayed=True),
    "checkpointed": Case(checkpointed=True),
    "checkpointed, relayed": Case(checkpointed=True, budget=12, relayed=True),
}
LEAN = ("tied", "relayed experts", "adapters")
SHARDS = 2


def samples() -> list[Sample]:
    """Trees of several shapes and sizes."""
    kinds = ("think_stripped", "forked", "compacted", "temperatures", "single_token")
    return [one for kind in kinds for one in forest(kind)]


def adapted(model: Any, **settings: Any) -> Any:
    """The trainer's `LoraTrainee`; not for `tests.support.rl.ranks`, where no service imports."""
    from services.trainer import setting_tables as tables
    from services.trainer.model.lora import LoraTrainee

    return LoraTrainee(model, tables.LoraSettings(**settings), model_path=Path())


def model_of(case: Case) -> Any:
    model = tiny_model(case.family, torch.float64, kv_heads=case.kv_heads)
    if case.adapters == ADAPTED:
        from peft import LoraConfig, inject_adapter_in_model

        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=2, target_modules=[*ADAPTED]), model)
    elif case.adapters:
        adapted(model, rank=2, targets=case.adapters)
    model.to(torch.float64)
    for name, one in model.named_parameters():
        if "lora_B" in name:  # zero at the start, and so would be the gradients of A
            torch.nn.init.normal_(one, std=0.3, generator=torch.Generator().manual_seed(1))
    return model


def policy_of(case: Case, world: World | None) -> TreePolicy:
    model = model_of(case)
    if case.checkpointed:
        recompute_activations(model)
    balance = BALANCE if "experts" in case.family or "moe" in case.family else 0.0
    policy = TreePolicy(model, balance_coef=balance)
    if world is not None:
        policy.spread(world)
    return policy


def planned(learner: Learner, batch: Sequence[Sample]) -> BatchPlan:
    """The plan of a rank: above rank 0 its part, if the parameters are divided."""
    plan, world = learner.plan(batch), learner.policy.world
    if world.rank and world.shape.sharded:
        return group_plans(plan, learner.policy)[world.data_group].plan()
    return plan


def gradient_error(case: Case, world: World) -> float:
    """On rank 0; elsewhere 0."""
    policy = policy_of(case, world)
    config = LearnerConfig(token_budget=case.budget, objective=CISPO)
    learner = Learner(policy, config)
    batch = samples()
    by_hand: AbstractContextManager[None] = nullcontext()
    model = model_of(case)
    if case.replayed:
        policy.replay_routes(partial(own_logprobs, policy.model, as_sample([1, 2, 3, 4])))
        assert policy.replay is not None
        batch = with_routes(batch, policy.replay.shape, apart=(0, 5))
        by_hand = routers_by_hand(model, batch)
    if case.relayed and policy.group is None:
        assert any(len(one.parts) > 1 for one in learner.plan(batch).trees)
    loss, _ = learner.accumulate(planned(learner, batch))
    if policy.balance is not None:
        loss += policy.balance.value
    found = {
        name: whole(one.grad)
        for name, one in policy.model.named_parameters()
        if one.grad is not None
    }
    if world.rank:
        return 0.0
    coef = policy.balance.coef if policy.balance is not None else 0.0
    with by_hand:
        expected = reference_gradient(model, batch, balance_coef=coef)
    return max(relative_errors(Gradient(loss=loss, of=found), expected))


def by_sequence_error(world: World) -> float:
    """Of the gradient of a model that is trained sequence by sequence, against one process."""
    found = []
    for one in (world, None):
        policy = policy_of(Case(family="llama4"), one)
        assert policy.unmerged
        learner = Learner(policy, LearnerConfig(token_budget=40))
        learner.accumulate(planned(learner, samples()))
        grads = [whole(each.grad) for each in policy.model.parameters() if each.grad is not None]
        found.append(torch.cat([each.flatten() for each in grads]))
    shared, alone = found
    return float((shared - alone).norm() / alone.norm())


STEPS = {
    "clipped": LearnerConfig(),
    "warm update passes": LearnerConfig(
        passes_per_batch=2, objective=ObjectiveConfig(algorithm="grpo", old_logprobs="recomputed")
    ),
    "penalty": LearnerConfig(objective=ObjectiveConfig(kl_coef=0.3, kl_estimator="k3")),
    "critic": LearnerConfig(objective=ObjectiveConfig(algorithm="ppo")),
    "ratios of trajectories": LearnerConfig(
        passes_per_batch=2, objective=ObjectiveConfig(algorithm="gspo", ratio_level="trajectory")
    ),
    "entropy bonus": LearnerConfig(
        objective=ObjectiveConfig(algorithm="ppo", normalization="trajectory", entropy_coef=0.3)
    ),
    "mini-batches": LearnerConfig(
        mini_batches=3, objective=ObjectiveConfig(algorithm="ppo", old_logprobs="recomputed")
    ),
    "draft heads": LearnerConfig(mtp=MtpConfig(heads=2)),
}


def step_error(
    config: LearnerConfig,
    world: World,
    *,
    served: bool = False,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Of weights, losses and statistics over two steps."""
    ends = []
    for one in (world, None):
        torch.manual_seed(0)
        policy = TreePolicy(tiny_model("llama", dtype))
        reference = TreePolicy(tiny_model("llama", dtype))
        if one is not None:
            policy.spread(one)
            reference.spread(one)
        learner = Learner(
            policy,
            replace(config, token_budget=40, optimizer=OptimizerConfig(learning_rate=1e-3)),
            reference=reference if config.objective.kl_coef else None,
            served=ServedValues(policy.model, published=torch.bfloat16) if served else None,
        )
        results = [learner.step(planned(learner, credited()), weight_version=5) for _ in range(2)]
        assert not any(each.skipped for each in results), [each.skipped for each in results]
        state = {name: whole(each.detach()) for name, each in policy.model.named_parameters()}
        if learner.mtp is not None:
            state |= dict(learner.mtp.heads.named_tensors())
        ends.append((results, state))
    (results, state), (expected, their_state) = ends
    if world.rank:
        return 0.0
    weights = max(float((state[name] - their_state[name]).abs().max()) for name in state)
    return max(weights, *map(result_error, results, expected))


def adapted_steps_error(world: World) -> float:
    """Of weights, adapters, losses and statistics over three steps, with the base as reference."""
    objective = ObjectiveConfig(kl_coef=0.3, kl_estimator="k3")
    optimizer = OptimizerConfig(learning_rate=1e-3)
    ends = []
    for one in (world, None):
        torch.manual_seed(0)
        model = tiny_model("llama", torch.float64)
        trainee = adapted(model, rank=2, alpha=8.0, targets=ADAPTED)
        model.to(torch.float64)
        policy = TreePolicy(model)
        if one is not None:
            policy.spread(one)
        config = LearnerConfig(token_budget=40, objective=objective, optimizer=optimizer)
        learner = Learner(policy, config, reference=trainee.base_reference(policy))
        results = [learner.step(planned(learner, credited()), weight_version=5) for _ in range(3)]
        assert not any(each.skipped for each in results), [each.skipped for each in results]
        tensors = {**dict(trainee.published()), **trainee.master()}
        ends.append((results, {name: whole(each.detach()) for name, each in tensors.items()}))
    (results, found), (expected_results, expected) = ends
    if world.rank:
        return 0.0
    assert any(bool(each.any()) for name, each in expected.items() if "lora_B" in name)
    weights = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    return max(weights, *map(result_error, results, expected_results))


def credited() -> list[Sample]:
    """Samples with returns, three to a trajectory, four to a group."""
    rng = Random(4)
    return [
        replace(
            one,
            returns=_returns(one, rng),
            domain=f"d{rng.randrange(2)}",
            trajectory=index // 3,
            group=index // 4,
        )
        for index, one in enumerate(samples())
    ]


def _returns(sample: Sample, rng: Random) -> bytes:
    one = torch.full((sample.trained_tokens,), rng.uniform(-1, 1))
    return one.numpy().tobytes()


def result_error(found: StepResult, expected: StepResult) -> float:
    """The largest difference of two results of the same step."""
    numbers = [
        (found.loss, expected.loss),
        (found.grad_norm / expected.grad_norm, 1.0),
        (found.stats.entropy, expected.stats.entropy),
        (found.stats.behavior_kl / expected.stats.behavior_kl, 1.0),
        (found.stats.clip_fraction, expected.stats.clip_fraction),
        (found.critic.explained_variance, expected.critic.explained_variance),
        (found.domains["d0"].gradient_share, expected.domains["d0"].gradient_share),
        (float(found.domains["d1"].tokens), float(expected.domains["d1"].tokens)),
        *zip(found.mtp.losses, expected.mtp.losses, strict=True),
        *zip(found.mtp.acceptance, expected.mtp.acceptance, strict=True),
    ]
    return max(abs(one - other) for one, other in numbers)


def narrow_error(world: World) -> float:
    """Of loss and gradient norm where layers are gathered in bfloat16 and computed under autocast;
    gradients of norms are rounded differently. Norms of ones round nothing."""
    results = []
    for one in (world, None):
        model = tiny_model("qwen3_moe", torch.float32)
        for weight in (one for one in model.parameters() if one.ndim == 1):  # norms
            torch.nn.init.normal_(weight, 1.0, 0.3, generator=torch.manual_seed(2))
        policy = TreePolicy(model, autocast=torch.bfloat16)
        if one is not None:
            policy.spread(one, narrow=torch.bfloat16)
        served = ServedValues(model, published=torch.bfloat16, autocast=torch.bfloat16)
        learner = Learner(policy, LearnerConfig(token_budget=40), served=served)
        results.append(learner.step(planned(learner, samples()), weight_version=5))
    found, expected = results
    norm = abs(found.grad_norm / expected.grad_norm - 1) / 1000
    return max(abs(found.loss - expected.loss), norm)


def refusal_error(world: World) -> float:
    """Optimizers of whole tensors are refused where a rank has only a part of them."""
    policy = policy_of(CASES["untied"], world)
    try:
        Learner(policy, LearnerConfig(optimizer=OptimizerConfig(name="muon")))
    except InvalidArgument as error:
        return 0.0 if world.shape.sharded and "'muon'" in str(error) else 1.0
    return float(world.shape.sharded)


def token_values_error(world: World) -> float:
    """Of the token values of every third sample, against the model's own forward; on rank 0."""
    policy = policy_of(CASES["untied"], world)
    learner = Learner(policy, LearnerConfig(token_budget=40, objective=CISPO))
    batch = numbered(samples())
    keep = range(0, len(batch), 3)
    result = learner.step(planned(learner, batch), weight_version=5, keep=keep)
    if world.rank:
        return 0.0
    assert sorted(result.token_values.numbers) == [*keep]
    return values_error(model_of(CASES["untied"]), batch, result.token_values, cap=CAP)


def held(world: World, case: Case) -> int:
    """Elements of the parameters that this rank holds."""
    policy = policy_of(case, world)
    return sum(local(one).numel() for one in policy.model.parameters())


def probe_error(world: World) -> float:
    """The check of a sharded model finds that it is exact."""
    policy = policy_of(CASES["tied"], world)
    check_policy(policy)
    return 1.0 if policy.unmerged else 0.0


def all_cases(mesh: str, world: World, *, lean: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    with wide_norms():
        for name, case in CASES.items():
            if lean and name not in LEAN:
                continue
            found[f"{mesh} fp64 {name}"] = gradient_error(case, world)
        if not lean:
            found[f"{mesh} fp64 steps with adapters"] = adapted_steps_error(world)
        found[f"{mesh} fp16 token values"] = token_values_error(world)
        if not lean and world.tree is None:  # ranks of a tree cannot compute it
            # Its norms compute in fp32 whatever the type of the model.
            found[f"{mesh} fp32 by sequence"] = by_sequence_error(world)
    if not lean:
        for name, config in STEPS.items():
            found[f"{mesh} fp32 step, {name}"] = step_error(config, world)
        found[f"{mesh} fp32 step, served"] = step_error(LearnerConfig(), world, served=True)
        if world.tree is None:  # ranges of a tree round attention differently
            found[f"{mesh} fp32 step, gathered in bf16"] = narrow_error(world)
        found[f"{mesh} fp32 refusal"] = refusal_error(world)
        found[f"{mesh} fp32 probe"] = probe_error(world)
    found[f"{mesh} held"] = held(world, CASES["untied"])
    return found


def run_shard(rank: int, meeting: str, results: str) -> None:
    """One of two ranks that shard the parameters; rank 0 writes the errors of some cases."""
    lean = partial(all_cases, lean=True)
    write_cases(f"1x{SHARDS}x1", lean, rank=rank, meeting=meeting, results=results)


if __name__ == "__main__":
    print_cases(MESHES, partial(all_cases, lean=False))
