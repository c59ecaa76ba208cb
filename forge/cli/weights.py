"""`forge weights`: published versions, the version of each worker, and the hold.

Owns the arguments and the output; the trainer owns the effect.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli.command_exit import console, finish, say
from forge.cli.connection import Connection
from forge.cli.options import with_options
from forge.cli.queue.command import Json
from forge.core.clocks import local_time_text

if TYPE_CHECKING:
    from forge.client.weights import WeightSteering
    from forge.v1 import trainer_pb2

weights_app = typer.Typer(
    no_args_is_help=True,
    help="Published weights: list them, hold an earlier version, try one on some workers. Default: "
    "the newest run under .forge.",
)
_POLL_S = 0.5
_INTERRUPTED = "Interrupted. The hold stays as it is: forge weights list shows it."
_DIGEST_CHARS = 12

Version = Annotated[
    int | None, typer.Argument(min=1, metavar="[VERSION]", help="Weight version to serve.")
]
Wait = Annotated[
    float,
    typer.Option(
        min=0, help="Longest wait, in seconds, until every worker serves its version; 0: none."
    ),
]


@weights_app.command("list")
@with_options
def list_weights(at: Connection, json: Json = False) -> None:
    """Show the versions that the trainer holds, the version of each worker, and the hold."""

    async def show() -> None:
        async with _steering(at) as steering:
            listing = await steering.listing()
        if json:
            from forge.cli.json_rows import print_row

            print_row(listing)
            return
        print_listing(listing)

    finish(show, "Interrupted.")


@weights_app.command()
@with_options
def rollback(at: Connection, version: Version = None, wait: Wait = 60.0) -> None:
    """Serve an earlier version, and hold it: newer publications wait for [bold]promote[/bold].

    Without VERSION: the base of a canary, else the version before the one in service. Training
    continues. The hold survives restarts of every service. The trainer's audit log has the call.
    """

    async def change(steering: WeightSteering) -> trainer_pb2.WeightsHold:
        from forge.client.weights import earlier_version

        wanted = version or earlier_version(await steering.listing())
        return await steering.roll_back(wanted)

    _steer(at, change, wait_s=wait)


@weights_app.command()
@with_options
def canary(
    at: Connection,
    version: Version = None,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the workers that serve VERSION.")
    ] = 0.25,
    wait: Wait = 60.0,
) -> None:
    """Serve a version on a share of the workers, and hold the present base on the others.

    Without VERSION: the newest. The base is the held version, or without a hold the version before.
    A canary ends by [bold]promote[/bold] with the newest version, by [bold]rollback[/bold] with the
    base.
    """

    async def change(steering: WeightSteering) -> trainer_pb2.WeightsHold:
        from forge.client.weights import newest_version

        wanted = version or newest_version(await steering.listing())
        return await steering.start_canary(wanted, share=share)

    _steer(at, change, wait_s=wait)


@weights_app.command()
@with_options
def promote(at: Connection, wait: Wait = 60.0) -> None:
    """End the hold: every worker serves the newest version, and follows publications again."""
    _steer(at, lambda steering: steering.promote(), wait_s=wait)


def _steer(
    at: Connection,
    change: Callable[[WeightSteering], Awaitable[trainer_pb2.WeightsHold]],
    *,
    wait_s: float,
) -> None:
    async def main() -> None:
        async with _steering(at) as steering:
            say(hold_line(await change(steering)))
            if wait_s and not await _adopted(steering, wait_s=wait_s):
                raise typer.Exit(1)

    finish(main, _INTERRUPTED)


async def _adopted(steering: WeightSteering, *, wait_s: float) -> bool:
    """Wait until every worker serves its version; print those that do not."""
    from asyncio import sleep

    from forge.client.weights import lagging

    give_up_s = time.monotonic() + wait_s
    while late := lagging(listing := await steering.listing()):
        if time.monotonic() >= give_up_s:
            for one in late:
                say(f"{worker_line(one)}, not yet v{one.wanted_version}")
            return False
        await sleep(_POLL_S)
    say(f"{len(listing.workers)} workers serve their version")
    return True


@asynccontextmanager
async def _steering(at: Connection) -> AsyncIterator[WeightSteering]:
    from forge.client.weights import WeightSteering

    async with at.open() as (coordinator, channels):
        yield WeightSteering(coordinator, channels)


def print_listing(listing: trainer_pb2.ListWeightsResponse) -> None:
    """Print versions, workers and the hold."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    left = ("published", "digest", "served by", "")
    for name in (
        "version",
        "step",
        "published",
        "size",
        "digest",
        "reward",
        "gap",
        "served by",
        "",
    ):
        table.add_column(name, justify="left" if name in left else "right")
    hold = listing.hold
    for one in listing.versions:
        version = one.weight_version
        serving = [w.instance_id for w in listing.workers if w.weight_version == version]
        marks = {hold.base_version: "held", hold.canary_version: "canary"}
        table.add_row(
            f"v{version}",
            str(one.step),
            local_time_text(one.published_unix_s),
            f"{one.total_bytes / (1 << 20):.1f} MiB",
            one.digest[:_DIGEST_CHARS],
            f"{one.mean_reward:.3f}" if one.trajectories else "",
            f"{one.logprob_gap:.4f}" if one.tokens else "",
            f"{len(serving)} of {len(listing.workers)} workers",
            marks.get(version, ""),
        )
    console.print(table)
    for worker in listing.workers:
        say(worker_line(worker))
    say(hold_line(hold))


def worker_line(worker: trainer_pb2.WeightsWorker) -> str:
    """One worker with the version it serves, and why that is not the wanted one."""
    error = f" ({worker.error})" if worker.error else ""
    return f"{worker.role} {worker.instance_id}: v{worker.weight_version}{error}"


def hold_line(hold: trainer_pb2.WeightsHold) -> str:
    """The hold in one line."""
    if not hold.base_version:
        return "no hold: workers follow the newest version"
    by = f"by {hold.subject}, since {local_time_text(hold.since_unix_s)}"
    if not hold.canary_version:
        return f"hold: all workers serve v{hold.base_version}, {by}"
    return (
        f"canary: {', '.join(hold.canary_workers)} serve v{hold.canary_version}, the others "
        f"v{hold.base_version}, {by}"
    )
