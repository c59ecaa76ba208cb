"""The memory of a step of a small model, measured, for comparison with an estimate."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge.rl.config import LearnerConfig, ObjectiveConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.capabilities import Way
from forge.rl.model.policy import TreePolicy
from forge.rl.model.recomputation import recompute_activations
from forge.rl.parallel.sharding import local
from forge.rl.parallel.world import World
from tests.support.rl.models import make_sample
from tests.support.rl.worlds import planned

TOKENS = 768
"""Of each sample, and so of each pass."""
PASSES = 2
"""Of each data group: the second one has the gradient of the first beside it."""
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def peak_bytes(step: Callable[[], object]) -> int:
    """Largest sum of live allocations during a call, beyond those before it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    now = peak = 0
    events: Any = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda one: one.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def measured_bytes(
    world: World,
    *,
    recompute: float = 0.0,
    frozen: int = 0,
    merged: bool = True,
    adapt: Callable[[Any], object] | None = None,
) -> int:
    """Of this rank at the peak of a whole step, in float32, with two `frozen` models of the same
    size beside the policy: a reference and a teacher. Without `merged` trees are computed sequence
    by sequence. `adapt` inserts adapters; it is the caller's,
    since `tests.support.rl.ranks` imports no service."""
    model: Any = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()
    if adapt is not None:
        adapt(model)
    if recompute:
        recompute_activations(model, share=recompute)
    coef = 0.1 if frozen else 0.0
    policies = [TreePolicy(model), *(_frozen() for _ in range(frozen))]
    for policy in policies:
        policy.spread(world)
        if not merged:
            policy.attention.use(Way(unmerged="for comparison"))
    learner = Learner(
        policies[0],
        LearnerConfig(
            token_budget=TOKENS, objective=ObjectiveConfig(kl_coef=coef, teacher_coef=coef)
        ),
        reference=policies[1] if frozen else None,
        teacher=policies[2] if frozen else None,
    )
    rng = Random(0)
    batch = planned(
        learner,
        [
            make_sample([rng.randrange(1024) for _ in range(TOKENS)], (1, TOKENS), rng=rng)
            for _ in range(PASSES * world.shape.data_groups)
        ],
    )
    learner.step(batch, weight_version=1)  # allocates the moments
    peak = peak_bytes(lambda: learner.step(batch, weight_version=1))
    sizes = [(local(one).numel() * 4, one.requires_grad) for one in model.parameters()]
    weights, trained = sum(size for size, _ in sizes), sum(size for size, own in sizes if own)
    # Weights, moments and frozen models; the step allocates the rest.
    return (1 + frozen) * weights + 2 * trained + peak


def _frozen() -> TreePolicy:
    return TreePolicy(Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval().requires_grad_(False))
