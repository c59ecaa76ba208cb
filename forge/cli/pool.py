"""`forge pool`: what an operator does with the data pool.

Owns the commands' arguments and what they print. Files of a shard are the business of
`services.pool.maintenance`, started as a process of its own since LMDB stays with the
pool; a running pool is spoken to by `forge.client.pool`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from forge.cli.command_exit import console, fail, finish
from forge.cli.connection import Connection
from forge.cli.pool_options import reading
from forge.core.errors import ForgeError
from forge.v1 import common_pb2, pool_pb2

pool_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Look into the data pool, and take care of its files.\n\n"
    "[bold]query[/bold], [bold]tail[/bold], [bold]stats[/bold] and [bold]export[/bold] ask a "
    "running pool, the newest run under .forge unless told otherwise. [bold]check[/bold], "
    "[bold]backup[/bold], [bold]restore[/bold], [bold]adopt[/bold] and [bold]compact[/bold] work "
    "on the directory of one shard (data_dir, in a run pool/0), on the host that has it.",
)

SERVED = 3
"""Exit code of the tool that compacts, for a shard that is served; stdout is then its name."""

Directory = Annotated[Path, typer.Argument(help="Directory of a shard, with its data.mdb.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")]


@pool_app.command()
@reading
def check(
    find: Callable[[], Connection],
    directory: Directory,
    repair: Annotated[
        str,
        typer.Option(
            metavar="COPY",
            help="Take what is damaged here from a copy: the directory of a replica or a backup, "
            "host:port of a replica that runs, or [bold]leader[/bold], found through etcd.",
        ),
    ] = "",
) -> None:
    """Verify every record of a shard: checksums, encodings, and what they say of each other.

    Turns must form a tree, seals match their turns, queue entries have their groups. Each damaged
    record is a line on stdout with its key; the exit code is then 1. Reads one snapshot, so the
    shard may be served meanwhile; a busy one grows while that lasts, so rather check a backup.

    With --repair the shard must be stopped. A closed trajectory becomes exactly what it was closed
    with, or stays as it is; what is left of the damage is then told in the same way.
    """
    options = [f"--repair={repair}"] if repair else []
    if _names_replica(repair):
        try:
            at = find()
        except ForgeError as error:
            fail(error)
        options += [
            *(f"--etcd={at.etcd}", f"--cluster={at.cluster}", f"--key-file={at.key_file}"),
            *(f"--tls-ca={at.tls_ca}", f"--tls-cert={at.tls_cert}", f"--tls-key={at.tls_key}"),
        ]
    _tool("check", directory, *options)


def _names_replica(copy: str) -> bool:
    host, _, port = copy.rpartition(":")
    return not Path(copy).exists() and (copy == "leader" or bool(host and port.isdecimal()))


@pool_app.command()
def backup(
    directory: Directory,
    target: Annotated[Path, typer.Argument(help="Directory to make; must not exist.")],
) -> None:
    """Copy a shard, running or not, as it stands at one moment.

    The copy is consistent and compact, and is a shard by itself. Run it on the host of the shard,
    as its user: the copy is read from its files, and the service is not stopped or slowed by it.
    """
    _tool("backup", directory, target)


@pool_app.command()
def restore(
    backup: Annotated[Path, typer.Argument(help="Directory that `forge pool backup` made.")],
    directory: Annotated[Path, typer.Argument(help="data_dir to make; must not exist.")],
) -> None:
    """Make a data directory out of a backup, and verify every record of it.

    Overwrites nothing, and leaves nothing behind when the backup is damaged. Then start the pool
    with that data_dir: it takes over the shard's name from the store it was copied from, unless a
    live process serves that, and that store is refused from then on.
    """
    _tool("restore", backup, directory)


@pool_app.command()
def adopt(directory: Directory) -> None:
    """Let the store in a directory take over its shard's name when it next starts.

    A name belongs to one store, and another one is refused. This is for a store that is to take
    the place of one that is gone for good, such as a copy made by hand or a new and empty one. A
    store that a live process serves is not replaced.
    """
    _tool("adopt", directory)


@pool_app.command()
@reading
def compact(find: Callable[[], Connection], directory: Directory) -> None:
    """Give the room of freed records in a shard's file back to the disk, running or not.

    The new file takes the old one's place at once, or not at all. A running shard is compacted by
    the pool that serves it, in its run or in the system named: it goes on meanwhile, and Ctrl-C
    leaves it as it was. It needs as much free room on the disk as its records take.
    """
    argv = _tool_argv("compact", directory)
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True)
    if done.returncode != SERVED:
        sys.stdout.write(done.stdout)
        raise typer.Exit(done.returncode)

    from forge.cli.pool_reading import compact_shard

    shard = done.stdout.strip()
    finish(
        lambda: compact_shard(find, shard, directory, console=console),
        f"Interrupted; {directory} is as it was.",
    )


@pool_app.command()
@reading
def query(
    at: Connection,
    wanted: pool_pb2.TrajectoryFilter,
    limit: Annotated[int, typer.Option(min=0, help="Most trajectories; 0 for all.")] = 50,
    json: Json = False,
) -> None:
    """List trajectories that fit every condition given.

    [dim]forge pool query --domain code --min-reward 0.5 --since 2h[/dim]
    """
    from forge.cli.pool_reading import list_trajectories

    finish(
        lambda: list_trajectories(at, wanted, limit=limit, as_json=json, console=console),
        "Interrupted.",
    )


@pool_app.command()
@reading
def tail(
    at: Connection,
    wanted: pool_pb2.TrajectoryFilter,
    cursor: Annotated[
        list[str] | None,
        typer.Option(help="Go on behind it; one per shard, as printed at the end of a tail."),
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Begin with the oldest, not with what comes now.")
    ] = False,
    json: Json = False,
) -> None:
    """Print trajectories as they are sealed, abandoned or rewarded late, until Ctrl-C.

    It survives restarts of the pool, and ends with the cursors from which another tail goes on
    without a gap.
    """
    from forge.cli.pool_reading import follow_trajectories

    finish(
        lambda: follow_trajectories(
            at, wanted, cursors=cursor or [], from_start=from_start, as_json=json, console=console
        ),
        "",
    )


@pool_app.command()
@reading
def export(
    at: Connection,
    wanted: pool_pb2.TrajectoryFilter,
    file: Annotated[Path, typer.Argument(help="To make: NAME.parquet or NAME.jsonl.")],
) -> None:
    """Write trajectories with their tokens, log-probs, versions and rewards to a file.

    One row is one trajectory with its turns, the same in both formats; memory does not grow with
    the number of rows. Sealed ones unless --state says otherwise. Damaged ones are named on stderr
    and left out; then the exit code is 1.

    [dim]forge pool export code.parquet --domain code --since 1d[/dim]
    """
    from forge.cli.pool_reading import export_trajectories

    if not wanted.state:
        wanted.state = common_pb2.TRAJECTORY_STATE_SEALED
    finish(
        lambda: export_trajectories(at, wanted, file, console=console),
        f"Interrupted; {file} is not written.",
    )


@pool_app.command()
@reading
def stats(at: Connection, json: Json = False) -> None:
    """Count groups and trajectories by domain and state, and show sizes and what waits."""
    from forge.cli.pool_reading import show_stats

    finish(lambda: show_stats(at, as_json=json, console=console), "Interrupted.")


def _tool(*words: str | Path) -> None:
    raise typer.Exit(subprocess.run(_tool_argv(*words)).returncode)


def _tool_argv(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "services.pool.maintenance", *map(str, words)]
