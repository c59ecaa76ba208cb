"""`forge queue`: an operator's hand on the generation queue.

Owns the commands and the line they print; what they mean is the scheduler's business.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from forge.cli.connection import Connection
from forge.cli.outcome import console, finish
from forge.cli.pool_options import reading
from forge.v1 import scheduler_pb2

queue_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Pause, resume and drain the generation queue of a running system, the newest run under "
    ".forge unless told otherwise. What is set outlives the scheduler.",
)
_POLL_S = 1.0


@queue_app.command()
@reading
def pause(at: Connection) -> None:
    """Hand out no rollout and no batch. What is out goes on, and ends."""
    finish(lambda: _set(at, scheduler_pb2.ACTIVITY_PAUSED), "Interrupted.")


@queue_app.command()
@reading
def resume(at: Connection) -> None:
    """Go on, after a pause or a drain."""
    finish(lambda: _set(at, scheduler_pb2.ACTIVITY_RUNNING), "Interrupted.")


@queue_app.command()
@reading
def drain(
    at: Connection,
    wait: Annotated[bool, typer.Option(help="Return once no group runs any more.")] = False,
) -> None:
    """Start no further group. Those that run end, and what is complete is trained on."""
    finish(lambda: _set(at, scheduler_pb2.ACTIVITY_DRAINING, wait=wait), "Still draining.")


@queue_app.command()
@reading
def status(at: Connection) -> None:
    """Show how the queue stands."""
    finish(lambda: _set(at, None), "Interrupted.")


async def _set(
    at: Connection, activity: scheduler_pb2.Activity.ValueType | None, *, wait: bool = False
) -> None:
    """Set it, unless it is None, and print how the queue stands then. Raises ForgeError."""
    # Only commands that talk to a scheduler pay for its client.
    from forge.client.operator import Operator

    async with at.open() as (coordinator, channels):
        operator = Operator(coordinator, channels)
        if activity is not None:
            await operator.set_activity(activity)
        found = await operator.scheduler_status()
        while wait and found.running_groups:
            await asyncio.sleep(_POLL_S)
            found = await operator.scheduler_status()
        console.print(line_of(found), highlight=False)


def line_of(status: scheduler_pb2.GetSchedulerStatusResponse) -> str:
    """How the queue stands, in one line."""
    activity = scheduler_pb2.Activity.Name(status.activity).removeprefix("ACTIVITY_").lower()
    complete = status.complete_in_window + status.complete_outside_window
    return (
        f"{activity}; {status.mode}: H {status.head}, W {status.window or 'all'}, "
        f"admission {status.admission}; {status.running_groups} of {status.running_limit} groups "
        f"run, {status.queued} queued, {complete} complete, {status.trained} trained, "
        f"{status.tombstoned} tombstoned ({status.skipped} skipped)"
    )
