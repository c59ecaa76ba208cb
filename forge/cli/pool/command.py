"""`forge pool`: the commands for the data pool; `forge trajectories` reads its content.

Owns arguments and output. `services.pool.maintenance` works on the files of a shard, in a separate
process, because only the pool may import LMDB; `forge.client.stored.pool` calls a running pool.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from forge.cli.command_exit import finish, say
from forge.cli.connection import Connection
from forge.cli.options import Json, SystemOptions, duration_s, with_options
from forge.cli.pool.trajectories import export, ls, tail
from forge.core.errors import InvalidArgument
from forge.core.extras import require_extra

pool_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Maintain the data pool and its files.\n\n"
    "[bold]stats[/bold] reads a running pool, [bold]erase[/bold] deletes from it, "
    "[bold]retire[/bold] and [bold]declare-lost[/bold] remove a shard; default: the newest run "
    "under .forge. [bold]check[/bold], [bold]backup[/bold], "
    "[bold]scheduled-backup[/bold], [bold]restore[/bold], "
    "[bold]adopt[/bold] and [bold]compact[/bold] work on the directory of one shard (data_dir; in "
    "a run pool/0), on its host. [bold]forge trajectories[/bold] reads what the pool has.",
)

SERVED = 3
"""Exit code of the compaction tool for a served shard; stdout then has the shard's name."""

Directory = Annotated[Path, typer.Argument(help="Directory of a shard, with its data.mdb.")]


@pool_app.command()
@with_options
def check(
    system: SystemOptions,
    directory: Directory,
    repair: Annotated[
        str,
        typer.Option(
            metavar="COPY",
            help="Replace damaged records from a copy: the directory of a replica or a backup, "
            "host:port of a running replica, or [bold]leader[/bold], found through etcd.",
        ),
    ] = "",
) -> None:
    """Verify every record of a shard: checksums, encodings, references between records.

    Turns must form a tree, seals match their turns, queue entries have their groups. Each damaged
    record is a line on stdout with its key; the exit code is then 1. Reads one snapshot, so the
    shard may run meanwhile; a busy shard grows during the check, so prefer a backup.

    With --repair the shard must be stopped. A closed trajectory gets exactly its original content,
    or does not change; the command prints the remaining damage in the same way.
    """
    if _names_replica(str(directory)):
        raise InvalidArgument(
            f"{directory} is a copy to repair from, not a directory: forge pool check DIRECTORY "
            f"--repair {directory}"
        )
    options = [f"--repair={repair}"] if repair else []
    if _names_replica(repair):
        options += _connection(system)
    _tool("check", directory, *options)


def _connection(system: SystemOptions) -> list[str]:
    at = system.resolved()
    at.keyring()
    return [
        *(f"--etcd={at.etcd}", f"--cluster={at.cluster}", f"--key-file={at.key_file}"),
        *(f"--tls-ca={at.tls_ca}", f"--tls-cert={at.tls_cert}", f"--tls-key={at.tls_key}"),
        *(f"--etcd-user={at.etcd_user}", f"--etcd-password-file={at.etcd_password_file}"),
        *(["--insecure"] if at.insecure else []),
    ]


def _names_replica(copy: str) -> bool:
    host, _, port = copy.rpartition(":")
    return not Path(copy).exists() and (copy == "leader" or bool(host and port.isdecimal()))


@pool_app.command()
def backup(
    directory: Directory,
    target: Annotated[Path, typer.Argument(help="Directory to make; must not exist.")],
    incremental: Annotated[
        Path | None,
        typer.Option(
            metavar="BASE", help="Store only what changed since this backup, full or incremental."
        ),
    ] = None,
) -> None:
    """Copy a snapshot of a shard, running or not.

    The copy is consistent, compact and a complete shard. Run it on the host of the shard, as its
    user: it reads the files, and neither stops nor slows the service. With --incremental it reads
    all records of shard and base and writes the difference; a restore needs the base beside it.

    [dim]forge pool backup /var/lib/forge/pool-0 s0-tue --incremental s0-mon[/dim]
    """
    _tool("backup", directory, target, *([f"--incremental={incremental}"] if incremental else []))


@pool_app.command("scheduled-backup")
def scheduled_backup(
    directory: Directory,
    folder: Annotated[
        Path, typer.Argument(help="Directory of the backups; made if it is missing.")
    ],
    full_every: Annotated[
        str, typer.Option(help="Age of the last full backup at which a run makes another.")
    ] = "7d",
    keep: Annotated[
        int, typer.Option(min=1, help="Full backups to keep, with their increments.")
    ] = 4,
) -> None:
    """Back up a shard from a timer: by full backups, and increments between them.

    Each run makes one backup, FOLDER/SHARD-TIME. The backup is full if the last full one is old
    enough or has 64 increments, or if no increment of it is possible. The run verifies the backup,
    then deletes the oldest chains. Killed at any moment, it leaves backups that restore. Exit code
    1: the shard is damaged; the run deleted nothing.

    [dim]forge pool scheduled-backup /var/lib/forge/pool-1 /var/backups/forge[/dim]
    """
    seconds = duration_s("full-every", full_every)
    _tool("back-up-scheduled", directory, folder, f"--full-every-s={seconds}", f"--keep={keep}")


@pool_app.command()
def watermark(
    backups: Annotated[
        list[Path],
        typer.Argument(
            help="One backup of each shard, or directories: the newest of each shard there."
        ),
    ],
) -> None:
    """Show the last step whose groups are trained in all of these backups.

    A checkpoint of that step, or of an earlier one, fits the restored shards: the trainer trains no
    group a second time. Clocks of pool hosts may differ by 5 s.
    """
    _tool("watermark", *backups)


@pool_app.command()
@with_options
def archive(
    system: SystemOptions,
    directory: Directory,
    to: Annotated[
        str, typer.Option("--to", metavar="URL", help="Any URL of fsspec: file://, s3://, ...")
    ],
    older_than: Annotated[
        str, typer.Option(help="Settled at least so long ago: 90s, 15m, 2h or 7d.")
    ] = "0s",
    free: Annotated[
        bool,
        typer.Option(
            "--free", help="Then have the running shard free the groups that the archive has."
        ),
    ] = False,
) -> None:
    """Copy settled groups with all their records to an archive.

    Skips groups that the archive already has as they are now, so the command may be killed and
    repeated, and run from a timer. Reads each segment back before it counts. Names damaged groups
    and leaves them out; the exit code is then 1. The shard may run meanwhile.

    With --free the running shard then frees the archived groups of any age, unless they changed
    meanwhile or were trained after the oldest kept checkpoint. Reads each segment once more before.
    Needs the cluster's key.

    [dim]forge pool archive /var/lib/forge/pool-0 --to s3://forge/archive --older-than 1d[/dim]
    """
    seconds = duration_s("older-than", older_than) or 0.0
    options = ["--free", *_connection(system)] if free else []
    _tool("archive", directory, f"--to={to}", f"--older-than-s={seconds}", *options)


@pool_app.command("restore-archive")
def restore_archive(
    url: Annotated[
        str, typer.Argument(help="URL of the archive, or of the directory of one store in it.")
    ],
    directory: Annotated[Path, typer.Argument(help="data_dir to make; must not exist.")],
    shard: Annotated[str, typer.Option(help="Name of the new shard.")] = "archive",
) -> None:
    """Make the data directory of a new shard from an archive, and verify every record of it.

    Serve it in a separate cluster: python -m services.pool --cluster archive. Then list, show and
    export its trajectories like those of any pool.
    """
    _tool("restore-archive", directory, f"--url={url}", f"--shard={shard}")


@pool_app.command()
def restore(
    backup: Annotated[Path, typer.Argument(help="Directory of `forge pool backup`.")],
    directory: Annotated[Path, typer.Argument(help="data_dir to make; must not exist.")],
) -> None:
    """Make a data directory from a backup, full or incremental, and verify every record of it.

    Migrates a backup of an earlier release to the present schema. Overwrites nothing, and removes
    the copy of a damaged backup. Then start the pool with that data_dir: it takes over the shard's
    name from the copied store, unless a live process serves that store. From then on the pool
    refuses the copied store.
    """
    _tool("restore", backup, directory)


@pool_app.command()
def adopt(directory: Directory) -> None:
    """Let the store in a directory take over its shard's name at its next start.

    A name belongs to one store; the pool refuses other stores. Use this for the successor of a lost
    store, such as a manual copy or an empty directory. It does not replace a store that a live
    process serves.
    """
    _tool("adopt", directory)


@pool_app.command()
@with_options
def compact(system: SystemOptions, directory: Directory) -> None:
    """Return the space of freed records in a shard's file to the disk, running or not.

    The new file replaces the old one atomically. The pool itself compacts a running shard, of the
    newest run or of the named system: it continues to serve, and Ctrl-C cancels without a change.
    The disk needs free space for a copy of all records.
    """
    argv = _tool_argv("compact", directory)
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True)
    if done.returncode != SERVED:
        sys.stdout.write(done.stdout)
        raise typer.Exit(done.returncode)

    from forge.cli.pool.pool_reading import compact_shard

    shard = done.stdout.strip()
    finish(
        lambda: compact_shard(system, shard, directory),
        f"Interrupted; {directory} did not change.",
    )


@pool_app.command()
@with_options
def erase(
    system: SystemOptions,
    task: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Task id; may be repeated.")
    ] = None,
    user: Annotated[str, typer.Option(help="All tasks of this user.")] = "",
    tag: Annotated[str, typer.Option(help="All tasks with this tag.")] = "",
    backup: Annotated[
        Path | None, typer.Option(help="Erase in this directory of `forge pool backup` instead.")
    ] = None,
    archive: Annotated[
        str, typer.Option(metavar="URL", help="Erase in the archives at this URL instead.")
    ] = "",
) -> None:
    """Erase every trajectory of tasks, in all replicas, for good.

    Removes prompts, answers, rewards, payloads, tags and users, also from free pages: it rewrites
    each file. An absent replica erases when it returns; the exit code is then 1. Task ids, counts
    and digests stay. Repeat the command for each kept backup and archive, and delete exports
    yourself. It names tables of rollouts in Weights & Biases and Trackio, and does not erase them.

    [dim]forge pool erase --user alice[/dim]
    """
    from forge.v1 import pool_pb2

    wanted = pool_pb2.EraseTrajectoriesRequest(task_ids=task or (), user=user, tag=tag)
    options = [f"--task={one}" for one in wanted.task_ids] + [f"--user={user}", f"--tag={tag}"]
    if backup is not None:
        _tool("erase", backup, *options)
    if archive:
        _tool("erase-archive", f"--url={archive}", *options)

    from forge.cli.pool.pool_reading import erase_trajectories

    finish(lambda: erase_trajectories(system, wanted), "Interrupted; repeat the command.")


Shard = Annotated[str, typer.Argument(help="Name of the shard: see forge pool stats.")]


@pool_app.command()
@with_options
def retire(
    at: Connection,
    shard: Shard,
    cancel: Annotated[bool, typer.Option(help="Stop: the shard gets new groups again.")] = False,
    wait: Annotated[bool, typer.Option(help="Return when the shard is retired.")] = True,
) -> None:
    """Move every group of a shard to the other shards, then unregister the shard.

    From then on the shard gets no new groups. Running rollouts end first. Trajectories, rewards and
    history move, too: nothing is lost. The scheduler does the work, so this command may be
    interrupted and repeated. At the end stop the instance: the pool refuses its store from then on.

    [dim]forge pool retire s1[/dim]
    """
    from forge.cli.pool.shard_removal import cancel_retirement, retire_shard

    if cancel:
        finish(lambda: cancel_retirement(at, shard), "Interrupted; repeat the command.")
    else:
        finish(
            lambda: retire_shard(at, shard, wait=wait),
            "Interrupted; the retirement continues. Repeat the command to watch it, with --cancel "
            "to stop it.",
        )


@pool_app.command("declare-lost")
@with_options
def declare_lost(
    at: Connection,
    shard: Shard,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Declare that the store of a shard is lost for good, so that the scheduler stops waiting.

    The scheduler tombstones its pending groups with the reason shard_lost. From then on the pool
    refuses its store, even if it returns. Retire a shard that is in discovery instead. Needs an
    admin's token.
    """
    if not yes:
        typed = typer.prompt(
            f"The trajectories of shard {shard} are lost, and the pool refuses its store for good. "
            "Type the name of the shard to continue",
            default="",
            show_default=False,
        )
        if typed != shard:
            say("Nothing was changed.")
            raise typer.Exit(1)
    from forge.cli.pool.shard_removal import declare_shard_lost

    finish(lambda: declare_shard_lost(at, shard), "Interrupted; repeat the command.")


@pool_app.command()
@with_options
def stats(at: Connection, json: Json = False) -> None:
    """Count groups and trajectories by domain and state; show sizes and the oldest group."""
    from forge.cli.pool.pool_reading import show_stats

    finish(lambda: show_stats(at, as_json=json), "Interrupted.")


def _tool(*words: str | Path) -> None:
    raise typer.Exit(subprocess.run(_tool_argv(*words)).returncode)


def _tool_argv(*words: str | Path) -> list[str]:
    require_extra("pool")
    return [sys.executable, "-m", "services.pool.maintenance", *map(str, words)]


# The names of these commands before there was `forge trajectories`.
for _name, _command in (("query", ls), ("tail", tail), ("export", export)):
    pool_app.command(_name, hidden=True)(_command)
