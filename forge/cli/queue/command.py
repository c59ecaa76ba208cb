"""`forge queue`: the commands for the generation queue.

Owns the arguments and the output; the scheduler owns the effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli.command_exit import console, finish, say
from forge.cli.connection import Connection
from forge.cli.options import duration_s, with_options
from forge.cli.queue.submission import Submission
from forge.cli.trouble import queue_lines, troubles
from forge.core.enum_words import enum_word
from forge.core.errors import InvalidArgument

if TYPE_CHECKING:
    from forge.v1 import scheduler_pb2

queue_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Fill, pause, resume and drain the generation queue of a running system; default: the "
    "newest run under .forge. The setting survives a restart of the scheduler.",
)
_POLL_S = 1.0

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


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
def drain_runner(
    at: Connection,
    runner: Annotated[str, typer.Argument(help="Id in discovery, see `forge status`.")],
    wait: Annotated[str, typer.Option(help="Longest wait for its rollouts, e.g. 10m.")] = "0s",
    resume: Annotated[bool, typer.Option("--resume", help="End the drain.")] = False,
) -> None:
    """Lease no further rollout to one runner, until it restarts. Its rollouts end there.

    Prints how many still run after the wait. A later scheduler leader keeps the drain.
    """
    wait_s = duration_s("wait", wait) or 0.0

    async def set_drain() -> None:
        from forge.cli.queue import runner_drain
        from forge.client.operator import Operator

        async with at.open() as (coordinator, channels):
            operator = Operator(coordinator, channels)
            left = await runner_drain.drain_runner(operator, runner, resume=resume, wait_s=wait_s)
        say(runner_drain.report(runner, left, resume=resume))

    finish(set_drain, "Interrupted. The drain is set.")


@queue_app.command()
@with_options
def status(at: Connection, json: Json = False) -> None:
    """Show the state of the queue, and the reasons of tombstones."""
    finish(lambda: _show(at, as_json=json), "Interrupted.")


@queue_app.command()
@with_options
def submit(at: Connection, submission: Submission) -> None:
    """Submit a file of tasks, epoch by epoch, and keep the queue filled until all are submitted.

    Waits while the scheduler is unreachable. After an interruption the same command continues after
    the tasks that the pool has, and shows their state.

    A line of the file, with a `domain` or the option --domain:

    [dim]{"payload": {"prompt": "What is 2 + 2?", "answer": "4"}}[/dim]

    [dim]forge queue submit sums.jsonl --domain sums --group-size 8 --epochs 3[/dim]
    """

    async def submit_all() -> None:
        from forge.cli.queue.submission_display import submit_file

        await submit_file(at, submission)

    finish(submit_all, "Interrupted. Run the same command again to continue.")


@queue_app.command()
@with_options
def drop(
    at: Connection,
    task_ids: Annotated[
        list[str] | None, typer.Argument(metavar="[TASK]...", help="Ids of the tasks.")
    ] = None,
    domain: Annotated[
        str, typer.Option(help="Instead of tasks: every pending group of the domain.")
    ] = "",
    scaffold: Annotated[str, typer.Option(help="Only the domain's tasks of this scaffold.")] = "",
    reason: Annotated[str, typer.Option(help="Stored with each group.")] = "dropped by an operator",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Tombstone pending groups, for example of tasks that no runner can run. They are not trained.

    Their rollouts lose their leases, and the head of the window passes them. Groups in a batch and
    settled groups stay as they are. The scheduler's audit log has the call.

    [dim]forge queue drop --domain web --reason "the runner for web is gone"[/dim]
    """
    if not task_ids and not domain:
        raise InvalidArgument("name tasks, or a domain by --domain; see forge queue drop --help")
    if not yes:
        selected = f"{len(task_ids)} named tasks" if task_ids else f"domain {domain}"
        if not typer.confirm(f"Pending groups of {selected} are never trained then. Continue?"):
            say("Nothing was changed.")
            raise typer.Exit(1)

    async def drop_groups() -> None:
        from forge.client.operator import Operator

        async with at.open() as (coordinator, channels):
            dropped = await Operator(coordinator, channels).drop_groups(
                task_ids or (), domain=domain, scaffold=scaffold, reason=reason
            )
            say(f"{dropped} groups dropped")

    finish(drop_groups, "Interrupted. Run the same command again to complete it.")


async def _show(at: Connection, *, as_json: bool) -> None:
    """Prints the state with the reasons of tombstones. Raises ForgeError."""
    from forge.cli.json_rows import print_row
    from forge.client.operator import Operator

    async with at.open() as (coordinator, channels):
        status = await Operator(coordinator, channels).scheduler_status(with_tombstones=True)
    if as_json:
        print_row(status)
        return
    _print(status)
    for text in queue_lines(status):
        console.print(text, soft_wrap=True)


async def _set(at: Connection, activity: str, *, wait: bool = False) -> None:
    """Sets the activity, and prints the state. Raises ForgeError."""
    # Late imports: other commands start faster without the client.
    import asyncio

    from forge.client.operator import Operator
    from forge.v1 import scheduler_pb2

    async with at.open() as (coordinator, channels):
        operator = Operator(coordinator, channels)
        await operator.set_activity(scheduler_pb2.Activity.Value(activity))
        status = await operator.scheduler_status()
        # A new leader first waits for the leases of runners.
        while wait and (status.running_groups or status.taking_over):
            await asyncio.sleep(_POLL_S)
            status = await operator.scheduler_status()
        _print(status)


def _print(status: scheduler_pb2.GetSchedulerStatusResponse) -> None:
    say(line_of(status))
    for text in troubles(status).values():
        console.print(text, style="yellow", soft_wrap=True)


def line_of(status: scheduler_pb2.GetSchedulerStatusResponse) -> str:
    """Returns the state of the queue in one line."""
    from forge.v1 import scheduler_pb2

    activity = enum_word(scheduler_pb2.Activity, status.activity)
    complete = status.complete_in_window + status.complete_outside_window
    return (
        f"{activity}; {status.mode}: H {status.head}, W {status.window or 'all'}, "
        f"admission {status.admission}; {status.running_groups} of {status.running_limit} groups "
        f"run, {status.queued} queued, {complete} complete, {status.trained} trained, "
        f"{status.tombstoned} tombstoned ({status.skipped} skipped)"
    )
