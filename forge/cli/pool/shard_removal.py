"""The output of `forge pool retire` and `forge pool declare-lost`."""

from __future__ import annotations

import asyncio

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from forge.cli.command_exit import console, say
from forge.cli.connection import Connection
from forge.client.operator import Operator
from forge.v1 import scheduler_pb2

POLL_S = 1.0
_RETIRED = scheduler_pb2.RETIREMENT_STATE_RETIRED


async def retire_shard(at: Connection, shard: str, *, wait: bool) -> None:
    """Starts the retirement and shows its progress to the end. Raises ForgeError."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    async with at.open() as (coordinator, channels):
        operator = Operator(coordinator, channels)
        answer = await operator.retire_shard(shard)
        if not wait and answer.state != _RETIRED:
            say(f"{shard} retires: {_text(answer.progress)}. Repeat the command to watch it.")
            return
        with Progress(*columns, console=console, transient=not console.is_terminal) as bar:
            task = bar.add_task("", total=None)
            most = 0
            while answer.state != _RETIRED:
                progress = answer.progress
                most = max(most, progress.groups_left)
                bar.update(
                    task,
                    description=_text(progress),
                    total=most or None,
                    completed=most - progress.groups_left,
                )
                await asyncio.sleep(POLL_S)
                answer = await _present(operator, shard)
    say(f"{shard} is retired: no group is left on it. Stop its instance; keep or delete its files.")


async def cancel_retirement(at: Connection, shard: str) -> None:
    """Stops the retirement. Raises ForgeError."""
    async with at.open() as (coordinator, channels):
        await Operator(coordinator, channels).retire_shard(shard, cancel=True)
    say(f"{shard} gets new groups again; groups that moved stay on the other shards")


async def declare_shard_lost(at: Connection, shard: str) -> None:
    """Declares the shard lost. Raises ForgeError."""
    async with at.open() as (coordinator, channels):
        answer = await Operator(coordinator, channels).declare_shard_lost(shard)
    say(
        f"{shard} is declared lost: {answer.tombstoned} pending groups tombstoned, "
        f"{answer.settled} settled groups stay counted"
    )


async def _present(operator: Operator, shard: str) -> scheduler_pb2.RetireShardResponse:
    """The progress by the status of the scheduler, so that only changes are in the audit log."""
    status = await operator.scheduler_status()
    for progress in status.retirements:
        if progress.pool_shard == shard:
            return scheduler_pb2.RetireShardResponse(progress=progress)
    return await operator.retire_shard(shard)


def _text(progress: scheduler_pb2.ShardRetirement) -> str:
    text = f"{progress.groups_left} groups left"
    if progress.groups_busy:
        text += f", {progress.groups_busy} of them run or are in a batch"
    return f"{text}; waits: {progress.waits_for}" if progress.waits_for else text
