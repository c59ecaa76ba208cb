"""Chooses how batches are read, by the settings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from forge.core.routes import RouteShape
from forge.rl.learner.batch_plan import plan_batch
from forge.rl.model.capabilities import attention_channels
from forge.runtime.rpc.remote import Remote
from services.trainer.batches.divided_reading import DividedReading, ReadingSettings
from services.trainer.batches.read_orders import PlanSettings
from services.trainer.batches.reading import BatchReading, LocalReading
from services.trainer.batches.trajectory_fetch import TrajectoryFetch, addresses_in, shard_in
from services.trainer.config import TrainerConfig
from services.trainer.learner.reading_ranks import DataGroupReaders


def batch_reading(
    config: TrainerConfig,
    pool: Remote[Any],
    readers: DataGroupReaders | None,
    *,
    model: Any,
    route_shape: RouteShape | None,
) -> BatchReading:
    """Reading by `readers`, or by this process alone without any. `model` is the transformers
    configuration of the policy; `route_shape` as for `forge.rl.learner.batch_plan.plan_batch`."""
    vocabulary = model.get_text_config(decoder=True).vocab_size
    rules = replace(config.credit_rules(), vocabulary=vocabulary)
    plan = PlanSettings(
        token_budget=config.token_budget,
        channels=attention_channels(model),
        relay=config.mesh_shape.cp == 1,
        route_shape=route_shape,
    )
    if readers is not None:
        return DividedReading(
            readers,
            addresses_in(pool),
            settings=ReadingSettings(
                rules=rules,
                plan=plan,
                mini_batches=config.mini_batches,
                patience_s=config.patience_s,
                logged_rollouts=config.logged_rollouts,
            ),
        )
    return LocalReading(
        fetch=TrajectoryFetch(shard_in(pool), patience_s=config.patience_s),
        plan=partial(
            plan_batch,
            token_budget=plan.token_budget,
            channels=plan.channels,
            relay=plan.relay,
            data_groups=config.mesh_shape.data_groups,
            mini_batches=config.mini_batches,
            route_shape=plan.route_shape,
        ),
        rules=rules,
        logged_rollouts=config.logged_rollouts,
    )
