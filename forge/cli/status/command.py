"""`forge status`: prints the state of a running stack for people, or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping

from rich.table import Column, Table
from rich.text import Text

from forge.cli.command_exit import console
from forge.cli.connection import Connection
from forge.cli.local_run.display import evaluation_line, step_line
from forge.cli.queue.command import line_of
from forge.cli.status.system_state import SystemState, read_state
from forge.cli.trouble import queue_lines
from forge.client.stored.pool import NO_ROOM_KEY, REFUSAL_KEY
from forge.core.enum_words import enum_word
from forge.core.errors import ForgeError
from forge.runtime.weights import ERROR_KEY
from forge.v1 import inference_pb2, scheduler_pb2, trainer_pb2

_FOR_PROGRAMS = frozenset(
    {
        *("block_tokens", "cache_reports", "capabilities", "host_memory", "incarnation", "leader"),
        *("lineage", "prefills_in_decode", "shared_http", "worker_stream"),
        *(ERROR_KEY, NO_ROOM_KEY, REFUSAL_KEY),
    }
)
"""Metadata that one service reads of another, or that is a problem below; `--json` has it."""


async def show_status(at: Connection, *, as_json: bool) -> None:
    """Prints services, answers and problems. Raises `Unavailable` without etcd."""
    async with at.open() as (coordinator, channels):
        state = await read_state(coordinator, channels, cluster=at.cluster)
    if as_json:
        sys.stdout.write(f"{state.as_json()}\n")
        return
    console.print(status_table(state))
    _print_section("scheduler", state.scheduler)
    _print_section("inference", state.inference)
    _print_section("trainer", state.trainer)
    for problem in state.problems():
        console.print(Text(problem, style="yellow"), soft_wrap=True)


def status_table(state: SystemState) -> Table:
    """One row for each service, and for each kind that is missing."""
    names = ("kind", "instance", "address", "state", "version", "details")
    columns = [Column(name, overflow="fold") for name in names]
    table = Table(*columns, title=f"Services of cluster {state.cluster}")
    for kind in state.missing:
        table.add_row(kind, Text("none", style="red"))
    for one in state.services:
        known = one.state in ("ready", "standby")
        table.add_row(
            one.kind,
            one.instance,
            one.address,
            Text((one.role or one.state) if known else one.state, style="" if known else "red"),
            one.version,
            Text(" ".join(f"{key}={value}" for key, value in _details(one.metadata))),
        )
    return table


def _details(metadata: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names and values for people: those that have a value, and the engine of a worker."""
    if capabilities := metadata.get("capabilities"):
        yield "engine", json.loads(capabilities).get("engine", "")
    for key, value in metadata.items():
        if value and key not in _FOR_PROGRAMS:
            yield key, value


def _print_section(
    name: str,
    status: scheduler_pb2.GetSchedulerStatusResponse
    | inference_pb2.GetInferenceStatusResponse
    | trainer_pb2.GetTrainerStatusResponse
    | ForgeError,
) -> None:
    console.print(Text(name, style="bold"))
    match status:
        case scheduler_pb2.GetSchedulerStatusResponse():
            lines = _scheduler_lines(status)
        case inference_pb2.GetInferenceStatusResponse():
            lines = _inference_lines(status)
        case trainer_pb2.GetTrainerStatusResponse():
            lines = _trainer_lines(status)
        case ForgeError():
            console.print(Text(str(status), style="yellow"), soft_wrap=True)
            return
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _scheduler_lines(status: scheduler_pb2.GetSchedulerStatusResponse) -> Iterator[str]:
    yield f"queue: {line_of(status)}"
    yield f"trained: {status.trained} groups"
    yield (
        f"attempts: {status.running_rollouts} running, {status.retries} repeated, "
        f"{status.faults} ended by the infrastructure"
    )
    for domain in status.domains:
        if domain.completed_rollouts:
            mean = f"mean outcome {domain.recent_reward:.2f}, {domain.completed_rollouts} rollouts"
        else:
            mean = "no complete rollout yet"
        yield f"domain {domain.domain}: {mean}"
    yield from queue_lines(status)


def _inference_lines(status: inference_pb2.GetInferenceStatusResponse) -> Iterator[str]:
    yield (
        f"model: {status.model}, context of {status.context_tokens} tokens, weights "
        f"v{status.weight_version}"
    )
    yield f"load: {status.queued} queued, {status.sampled_tokens_per_s:.0f} sampled tokens/s"
    for worker in status.workers:
        engine = f" ({worker.engine})" if worker.engine else ""
        yield (
            f"{worker.role} {worker.instance_id}{engine}: weights v{worker.weight_version}, "
            f"{worker.running} running, {worker.queued} queued"
        )


def _trainer_lines(status: trainer_pb2.GetTrainerStatusResponse) -> Iterator[str]:
    phase = enum_word(trainer_pb2.TrainerPhase, status.phase)
    limit = f" of {status.max_steps}" if status.max_steps else ""
    yield (
        f"steps trained: {status.step}{limit}, {phase}; weights v{status.weight_version}, "
        f"checkpoint of step {status.checkpoint_step}"
    )
    if status.held_weight_version:
        canary = status.canary_weight_version
        yield (
            f"weights v{status.held_weight_version} are held"
            + (f" beside canary v{canary}" if canary else "")
            + ": newer ones wait for `forge weights promote`"
        )
    if status.HasField("latest"):
        yield step_line(status.latest, status.max_steps)
    if status.HasField("latest_evaluation"):
        yield evaluation_line(status.latest_evaluation)
