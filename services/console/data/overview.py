"""The state of a run for its overview: training, queue, inference, held-out points."""

from __future__ import annotations

import asyncio
from typing import Any

from forge.cli.status.system_state import or_error
from forge.cli.trouble import troubles
from forge.client.operator import DomainResult, Operator, domain_results
from forge.core.enum_words import enum_word
from forge.core.errors import ForgeError
from forge.v1 import inference_pb2, scheduler_pb2, trainer_pb2

CAMPAIGN_TAGS = ("eval-before", "eval-after")
"""Tags of the measurements of `forge run`, which are not the trainer's."""
LOOK_AGAIN = 10
"""Reads of the overview between two looks at the groups of a tag that has not ended."""


class Overview:
    """Reads the overview of a run."""

    def __init__(self, operator: Operator, *, cluster: str) -> None:
        self._operator = operator
        self._cluster = cluster
        self._measured: dict[str, dict[str, Any]] = {}
        """Ended measurements of the campaign, by tag."""
        self._reads = 0

    async def read(self) -> dict[str, Any]:
        """The state as plain data; a service that does not answer is an error text."""
        scheduler, inference, trainer = await asyncio.gather(
            or_error(self._operator.scheduler_status(with_tombstones=True)),
            or_error(self._operator.inference_status()),
            or_error(self._operator.trainer_status(with_evaluations=True)),
        )
        errors = {
            name: str(answer)
            for name, answer in (
                ("scheduler", scheduler),
                ("inference", inference),
                ("trainer", trainer),
            )
            if isinstance(answer, ForgeError)
        }
        state: dict[str, Any] = {"cluster": self._cluster, "errors": errors}
        if isinstance(scheduler, scheduler_pb2.GetSchedulerStatusResponse):
            await self._look_at_campaign()
            state["scheduler"] = scheduler_row(scheduler)
        if isinstance(inference, inference_pb2.GetInferenceStatusResponse):
            state["inference"] = inference_row(inference)
        if isinstance(trainer, trainer_pb2.GetTrainerStatusResponse):
            state["trainer"] = trainer_row(trainer)
        state["campaign"] = self._measured
        return state

    async def _look_at_campaign(self) -> None:
        """Reads measurements of `forge run`, rarely: their groups are the scheduler's to list."""
        self._reads += 1
        if self._reads % LOOK_AGAIN != 1:
            return
        for tag in CAMPAIGN_TAGS:
            if tag in self._measured:
                continue
            try:
                groups = [group async for group in self._operator.groups(tag)]
            except ForgeError:
                return
            if not groups or any(group.phase in ("queued", "running") for group in groups):
                # The second one follows the first.
                return
            self._measured[tag] = measured(domain_results(groups))


def measured(results: list[DomainResult]) -> dict[str, Any]:
    """One measurement of held-out tasks, by domain and over all."""
    rollouts = sum(one.rollouts for one in results)
    versions = [one.min_weight_version for one in results if one.min_weight_version >= 0]
    return {
        "mean_reward": sum(one.mean_outcome * one.rollouts for one in results) / max(1, rollouts),
        "rollouts": rollouts,
        "weight_version": min(versions, default=-1),
        "domains": {one.domain: {"mean_reward": one.mean_outcome} for one in results},
    }


def scheduler_row(status: scheduler_pb2.GetSchedulerStatusResponse) -> dict[str, Any]:
    """The queue in numbers."""
    names = (
        *("head", "window", "concurrency", "running_limit", "mode", "admission", "queued"),
        *("running_groups", "running_rollouts", "complete_in_window", "complete_outside_window"),
        *("accepted", "trained", "tombstoned", "pending", "eval_pending", "retries", "faults"),
        *("skipped", "surplus", "untrained_s", "taking_over"),
    )
    activity = enum_word(scheduler_pb2.Activity, status.activity)
    return {name: getattr(status, name) for name in names} | {
        "activity": activity,
        "problems": list(troubles(status).values()),
        "unserved": [f"{one.domain}, {one.scaffold}" for one in status.unserved],
        "tombstones": [
            {"reason": one.reason, "groups": one.groups, "task_id": one.task_id}
            for one in status.tombstones
        ],
        "domains": [
            {
                "domain": one.domain,
                "share": one.share,
                "completed_rollouts": one.completed_rollouts,
                "recent_reward": one.recent_reward,
            }
            for one in status.domains
        ],
    }


def inference_row(status: inference_pb2.GetInferenceStatusResponse) -> dict[str, Any]:
    """The load of inference."""
    return {
        "model": status.model,
        "context_tokens": status.context_tokens,
        "weight_version": status.weight_version,
        "queued": status.queued,
        "running": sum(worker.running for worker in status.workers),
        "sampled_tokens": status.sampled_tokens,
        "sampled_tokens_per_s": status.sampled_tokens_per_s,
        "workers": len(status.workers),
    }


def trainer_row(status: trainer_pb2.GetTrainerStatusResponse) -> dict[str, Any]:
    """The progress of training, with every held-out point."""
    phase = enum_word(trainer_pb2.TrainerPhase, status.phase)
    # A trainer of an earlier release has the last one only.
    evaluations = list(status.evaluations) or [
        status.latest_evaluation for _ in range(status.HasField("latest_evaluation"))
    ]
    return {
        "phase": phase,
        "step": status.step,
        "max_steps": status.max_steps,
        "weight_version": status.weight_version,
        "checkpoint_step": status.checkpoint_step,
        "evaluating": status.evaluating,
        "evaluations": [_evaluation(one) for one in evaluations],
    }


def _evaluation(one: trainer_pb2.Evaluation) -> dict[str, Any]:
    def interval(part: trainer_pb2.Evaluation | trainer_pb2.DomainEvaluation) -> dict[str, Any]:
        return {
            "mean_reward": part.mean_reward,
            "low": part.mean_reward_low,
            "high": part.mean_reward_high,
            "solved_share": part.solved_share,
        }

    domains = {domain: interval(part) for domain, part in one.domains.items()}
    return {
        "step": one.step,
        "weight_version": one.weight_version,
        "rollouts": one.rollouts,
        "failed": one.failed,
        "domains": domains,
    } | interval(one)
