"""`forge queue`: an operator's hand on the generation queue.

Owns the commands and the line they print; what they mean is the scheduler's business.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli.command_exit import console, finish
from forge.cli.connection import Connection
from forge.cli.pool_options import reading
from forge.cli.trouble import troubles
from forge.v1 import common_pb2, scheduler_pb2

if TYPE_CHECKING:
    from forge.cli.submitting import Submission
    from forge.core.tasks.dataset_cursor import DatasetCursor

queue_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Fill, pause, resume and drain the generation queue of a running system, the newest run "
    "under .forge unless told otherwise. What is set outlives the scheduler.",
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


@queue_app.command()
@reading
def submit(
    at: Connection,
    file: Annotated[Path, typer.Argument(help="JSON Lines: an object with `payload` per task.")],
    name: Annotated[str, typer.Option(help="Of the data set. Default: the file's name.")] = "",
    epochs: Annotated[int, typer.Option(min=0, help="0: without end.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the order within each epoch.")] = 0,
    shuffle: Annotated[bool, typer.Option(help="Each epoch in an order of its own.")] = True,
    queued: Annotated[int, typer.Option(min=1, help="Groups to keep waiting in the queue.")] = 256,
    curriculum: Annotated[
        str, typer.Option(help="module:function that chooses which tasks come next.")
    ] = "",
    domain: Annotated[str, typer.Option(help="Of tasks that name none.")] = "",
    scaffold: Annotated[str, typer.Option(help="Of tasks that name none.")] = "blackbox",
    group_size: Annotated[int, typer.Option(min=1, help="Of tasks that name none.")] = 8,
    held_out: Annotated[
        Path | None, typer.Option(help="Refuse the file if it has a task of this one.")
    ] = None,
) -> None:
    """Submit a file of tasks, epoch by epoch, and keep the queue filled until all are in it.

    Interrupted, the same command goes on where it stood: the tasks in the pool say where.
    """
    from forge.cli.submitting import Submission

    submission = Submission(
        file=file,
        name=name or file.stem,
        epochs=epochs,
        seed=seed,
        shuffle=shuffle,
        queued=queued,
        curriculum=curriculum,
        defaults=common_pb2.Task(domain=domain, scaffold=scaffold, group_size=group_size),
        held_out=held_out,
    )
    finish(lambda: _submit(at, submission), "Interrupted. The same command goes on.")


async def _submit(at: Connection, submission: Submission) -> None:
    """Raises ForgeError."""
    from forge.cli.submitting import Submitter
    from forge.client.operator import Operator

    def show(cursor: DatasetCursor, accepted: int) -> None:
        console.print(f"{accepted} tasks submitted, epoch {cursor.epoch}", highlight=False)

    async with at.open() as (coordinator, channels):
        submitter = Submitter(Operator(coordinator, channels), submission)
        await submitter.run(show)
        console.print(f"all of {submission.name} is in the queue", highlight=False)


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
        # A new leader learns from runners what runs.
        while wait and (found.running_groups or found.taking_over):
            await asyncio.sleep(_POLL_S)
            found = await operator.scheduler_status()
        console.print(line_of(found), highlight=False, soft_wrap=True)
        for text in troubles(found).values():
            console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


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
