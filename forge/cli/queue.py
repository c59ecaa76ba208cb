"""`forge queue`: the commands for the generation queue.

Owns the arguments and the output; the scheduler owns the effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli.command_exit import console, finish, say
from forge.cli.connection import Connection
from forge.cli.options import with_options
from forge.cli.submission import Submission
from forge.cli.trouble import troubles

if TYPE_CHECKING:
    from forge.core.tasks.dataset_cursor import DatasetCursor
    from forge.v1 import scheduler_pb2

queue_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Fill, pause, resume and drain the generation queue of a running system; default: the "
    "newest run under .forge. The setting survives a restart of the scheduler.",
)
_POLL_S = 1.0


@queue_app.command()
@with_options
def pause(at: Connection) -> None:
    """Lease no further rollout and no further batch. Leased ones continue to their end."""
    finish(lambda: _set(at, "ACTIVITY_PAUSED"), "Interrupted.")


@queue_app.command()
@with_options
def resume(at: Connection) -> None:
    """Continue after a pause or a drain."""
    finish(lambda: _set(at, "ACTIVITY_RUNNING"), "Interrupted.")


@queue_app.command()
@with_options
def drain(
    at: Connection,
    wait: Annotated[bool, typer.Option(help="Return when no group runs.")] = False,
) -> None:
    """Start no further group. Running groups end, and complete groups are trained."""
    finish(lambda: _set(at, "ACTIVITY_DRAINING", wait=wait), "Still draining.")


@queue_app.command()
@with_options
def status(at: Connection) -> None:
    """Show the state of the queue."""
    finish(lambda: _set(at, None), "Interrupted.")


@queue_app.command()
@with_options
def submit(at: Connection, submission: Submission) -> None:
    """Submit a file of tasks, epoch by epoch, and keep the queue filled until all are submitted.

    After an interruption the same command continues, by the tasks that the pool has.
    """
    finish(lambda: _submit(at, submission), "Interrupted. Run the same command again to continue.")


@queue_app.command()
@with_options
def drop(
    at: Connection,
    reason: Annotated[str, typer.Option(help="Stored with each group.")],
    task_ids: Annotated[list[str] | None, typer.Argument(metavar="[TASK]...")] = None,
    domain: Annotated[
        str, typer.Option(help="Instead of tasks: every pending group of the domain.")
    ] = "",
    scaffold: Annotated[str, typer.Option(help="Only the domain's tasks of this scaffold.")] = "",
) -> None:
    """Tombstone pending groups, for example of tasks that no runner can do. They are not trained.

    Groups in a batch and settled groups stay as they are.

    [dim]forge queue drop --domain web --reason "the runner for web is gone"[/dim]
    """

    async def drop_groups() -> None:
        from forge.client.operator import Operator

        async with at.open() as (coordinator, channels):
            dropped = await Operator(coordinator, channels).drop_groups(
                task_ids or (), domain=domain, scaffold=scaffold, reason=reason
            )
            say(f"{dropped} groups dropped")

    finish(drop_groups, "Interrupted. Run the same command again to complete it.")


async def _submit(at: Connection, submission: Submission) -> None:
    """Raises ForgeError."""
    from forge.cli.submitting import Submitter
    from forge.client.operator import Operator

    def show(cursor: DatasetCursor, accepted: int) -> None:
        console.print(f"{accepted} tasks submitted, epoch {cursor.epoch}")

    async with at.open() as (coordinator, channels):
        submitter = Submitter(Operator(coordinator, channels), submission)
        await submitter.run(show)
        console.print(f"all of {submission.name} is in the queue")


async def _set(at: Connection, activity: str | None, *, wait: bool = False) -> None:
    """Sets the activity, unless it is None, and prints the state. Raises ForgeError."""
    # Late imports: other commands start faster without the client.
    import asyncio

    from forge.client.operator import Operator
    from forge.v1 import scheduler_pb2

    async with at.open() as (coordinator, channels):
        operator = Operator(coordinator, channels)
        if activity is not None:
            await operator.set_activity(scheduler_pb2.Activity.Value(activity))
        status = await operator.scheduler_status()
        # A new leader first waits for the leases of runners.
        while wait and (status.running_groups or status.taking_over):
            await asyncio.sleep(_POLL_S)
            status = await operator.scheduler_status()
        say(line_of(status))
        for text in troubles(status).values():
            console.print(text, style="yellow", markup=False, soft_wrap=True)


def line_of(status: scheduler_pb2.GetSchedulerStatusResponse) -> str:
    """Returns the state of the queue in one line."""
    from forge.v1 import scheduler_pb2

    activity = scheduler_pb2.Activity.Name(status.activity).removeprefix("ACTIVITY_").lower()
    complete = status.complete_in_window + status.complete_outside_window
    return (
        f"{activity}; {status.mode}: H {status.head}, W {status.window or 'all'}, "
        f"admission {status.admission}; {status.running_groups} of {status.running_limit} groups "
        f"run, {status.queued} queued, {complete} complete, {status.trained} trained, "
        f"{status.tombstoned} tombstoned ({status.skipped} skipped)"
    )
