"""`python -m services.pool.maintenance`: commands on a shard's files; `forge pool` starts it.

Exit codes: 0 success, 1 damage, 2 an error, 3 a served shard, which is compacted through its
service: stdout is its name.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from forge.cli.connection import Connection
from forge.core.errors import ConfigError, ForgeError
from forge.v1 import pool_pb2
from services.pool.maintenance.archive.archive import archive_settled, erase_in_archives, freeable
from services.pool.maintenance.archive.archive_release import free_archived
from services.pool.maintenance.archive.archive_restore import restore_archive
from services.pool.maintenance.backup import backup
from services.pool.maintenance.backup.backup import room
from services.pool.maintenance.backup.backup_erasure import erase_in
from services.pool.maintenance.backup.increments import back_up_changes
from services.pool.maintenance.backup.manifests import common_step, read_manifest
from services.pool.maintenance.backup.restore import restore
from services.pool.maintenance.backup.scheduled_backups import (
    back_up_scheduled,
    newest_of_each_shard,
)
from services.pool.maintenance.integrity import Damage
from services.pool.maintenance.repair import OpenCopy, copy_in, repair
from services.pool.maintenance.replica_copy import copy_at
from services.pool.storage.environment.file_locks import InUse
from services.pool.storage.records import Records
from services.pool.validation import check_erase

DAMAGED, REFUSED, SERVED = 1, 2, 3
SHOWN_DAMAGE = 1000
"""Most lines of damage; more are counted."""
_CONNECTION = (
    *("--etcd", "--cluster", "--key-file", "--tls-ca", "--tls-cert", "--tls-key"),
    *("--etcd-user", "--etcd-password-file"),
)
"""Connection to the system of the shard: of `--free`, and of `--repair` unless its copy is a
directory."""


def main(argv: Sequence[str]) -> int:
    """Runs one command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m services.pool.maintenance", description=__doc__
    )
    commands = parser.add_subparsers(required=True)
    for name, run, names in (
        ("check", _check, ["directory"]),
        ("backup", _backup, ["directory", "target"]),
        ("back-up-scheduled", _back_up_scheduled, ["directory", "folder"]),
        ("restore", _restore, ["backup", "directory"]),
        ("watermark", _watermark, []),
        ("archive", _archive, ["directory"]),
        ("restore-archive", _restore_archive, ["directory"]),
        ("erase-archive", _erase_archive, []),
        ("adopt", _adopt, ["directory"]),
        ("compact", _compact, ["directory"]),
        ("erase", _erase, ["directory"]),
    ):
        command = commands.add_parser(name)
        for argument in names:
            command.add_argument(argument, type=Path)
        command.set_defaults(run=run)
        _add_options(command, name)
    options = parser.parse_args(argv)
    try:
        code: int = options.run(options)
    except ForgeError as error:
        sys.stderr.write(f"forge: {error}\n")
        return REFUSED
    return code


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    if name == "check":
        command.add_argument("--repair", metavar="COPY")
    if name in ("check", "archive"):
        for option in _CONNECTION:
            command.add_argument(option, default="")
        command.add_argument("--insecure", action="store_true")
    if name == "backup":
        command.add_argument("--purge", action="store_true")
        command.add_argument("--incremental", metavar="BASE", type=Path)
    if name == "back-up-scheduled":
        command.add_argument("--full-every-s", type=float, required=True)
        command.add_argument("--keep", type=int, required=True)
    if name == "archive":
        command.add_argument("--to", required=True)
        command.add_argument("--older-than-s", type=float, required=True)
        command.add_argument("--free", action="store_true")
    if name == "restore-archive":
        command.add_argument("--url", required=True)
        command.add_argument("--shard", required=True)
    if name == "erase-archive":
        command.add_argument("--url", required=True)
    if name == "watermark":
        command.add_argument("backups", nargs="+", type=Path)
    if name in ("erase", "erase-archive"):
        command.add_argument("--task", action="append")
        command.add_argument("--user")
        command.add_argument("--tag")


def _check(options: argparse.Namespace) -> int:
    with _bar("checking") as progress:
        if options.repair is not None:
            left = repair(options.directory, _copy(options), progress)
            return _tell(iter(left), f"{options.directory} is whole")
        return _tell(backup.check(options.directory, progress), f"{options.directory} is whole")


def _copy(options: argparse.Namespace) -> OpenCopy:
    if not options.etcd:
        return copy_in(Path(options.repair))
    return copy_at(_connection(options), options.repair)


def _connection(options: argparse.Namespace) -> Connection:
    return Connection(
        etcd=options.etcd,
        cluster=options.cluster,
        key_file=Path(options.key_file),
        tls_ca=options.tls_ca,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        insecure=options.insecure,
        etcd_user=options.etcd_user,
        etcd_password_file=options.etcd_password_file,
    )


def _backup(options: argparse.Namespace) -> int:
    if options.incremental is not None:
        with _bar("comparing") as progress:
            made = back_up_changes(options.directory, options.incremental, options.target, progress)
        _say(
            f"{options.target}: {made.changed} changed and {made.deleted} deleted records since "
            f"{options.incremental}, {decimal(made.size_bytes)}"
        )
        return 0
    with _bar("copying") as progress:
        size_bytes = backup.backup(options.directory, options.target, progress, purge=options.purge)
    _say(f"{options.target}: {decimal(size_bytes)}; verify it with `forge pool check`")
    return 0


def _back_up_scheduled(options: argparse.Namespace) -> int:
    with _bar("backing up") as progress:
        made = back_up_scheduled(
            options.directory,
            options.folder,
            progress,
            full_every_s=options.full_every_s,
            keep=options.keep,
            now_unix_s=time.time(),
        )
    _say(
        f"{made.made}: "
        + (f"full, because {made.full_because}" if made.full_because else "an increment")
    )
    for directory in made.deleted:
        _say(f"{directory} is deleted")
    if made.damage:
        sys.stderr.write("forge: the shard is damaged; no earlier backup is deleted\n")
    return _tell(iter(made.damage), f"{made.made} is whole") if made.full_because else 0


def _restore(options: argparse.Namespace) -> int:
    with _bar("restoring") as progress:
        damage = restore(options.backup, options.directory, progress)
    code = _tell(iter(damage), f"{options.directory} is restored and whole")
    with suppress(ConfigError):
        steps = read_manifest(options.backup).steps
        _say(
            f"its newest step is {steps[0][0] if steps else 0}; `forge pool watermark` shows the "
            "last step that the backups of all shards have"
        )
    if code:
        sys.stderr.write(f"forge: {options.backup} is damaged: nothing was restored\n")
    return code


def _archive(options: argparse.Namespace) -> int:
    before_unix_s = time.time() - options.older_than_s
    with _bar("archiving") as progress, room(), backup.snapshot(options.directory) as opened:
        made = archive_settled(
            Records(*opened),
            options.to,
            settled_before_unix_s=before_unix_s,
            progress=lambda done: progress(done, done + 1),
        )
    for task_id in made.damaged:
        sys.stderr.write(f"forge: group {task_id} is damaged and not archived\n")
    _say(
        f"{options.to}: {made.groups} groups in {made.segments} segments, "
        f"{decimal(made.size_bytes)}; {made.known} were there"
    )
    if options.free:
        _free_archived(options, before_unix_s)
    return DAMAGED if made.damaged else 0


def _free_archived(options: argparse.Namespace, before_unix_s: float) -> None:
    with room(), backup.snapshot(options.directory) as opened:
        digests = freeable(Records(*opened), options.to, settled_before_unix_s=before_unix_s)
    shard = backup.shard_name(options.directory)
    freed = free_archived(_connection(options), shard, digests)
    left = len(digests) - len(freed)
    _say(
        f"{len(freed)} archived groups are freed"
        + (f"; {left} are kept: no checkpoint covers them yet, or they changed" if left else "")
    )


def _restore_archive(options: argparse.Namespace) -> int:
    with _bar("restoring") as progress, room():
        damage = restore_archive(
            options.url, options.directory, shard=options.shard, progress=progress
        )
    return _tell(iter(damage), f"{options.directory} is restored and whole")


def _watermark(options: argparse.Namespace) -> int:
    # A folder of scheduled backups counts as the newest one of each shard.
    backups = [one for given in options.backups for one in newest_of_each_shard(given) or [given]]
    manifests = [read_manifest(directory) for directory in backups]
    for directory, manifest in zip(backups, manifests, strict=True):
        taken = datetime.fromtimestamp(manifest.taken_unix_s, UTC)
        newest = manifest.steps[0][0] if manifest.steps else 0
        _say(
            f"{directory}: shard {manifest.shard}, {taken:%Y-%m-%d %H:%M:%S} UTC, newest step "
            f"{newest}" + (f", follows {manifest.base}" if manifest.base else "")
        )
    _say(f"step {common_step(manifests)}")
    return 0


def _adopt(options: argparse.Namespace) -> int:
    name = backup.adopt(options.directory)
    _say(
        f"{options.directory} takes over shard {name} when it next starts, unless a live process "
        "serves that; the store it belonged to is refused from then on"
    )
    return 0


def _compact(options: argparse.Namespace) -> int:
    try:
        with _bar("compacting") as progress:
            before, after = backup.compact(options.directory, progress)
    except InUse:
        _say(backup.shard_name(options.directory))
        return SERVED
    _say(f"{options.directory}: {decimal(before)} before, {decimal(after)} after")
    return 0


def _erase_archive(options: argparse.Namespace) -> int:
    request = _erasure(options)
    check_erase(request)
    with room():
        erased = erase_in_archives(options.url, request)
    _say(f"{options.url}: {erased.groups} groups erased, {erased.segments} segments rewritten")
    return 0


def _erasure(options: argparse.Namespace) -> pool_pb2.EraseTrajectoriesRequest:
    return pool_pb2.EraseTrajectoriesRequest(
        task_ids=options.task, user=options.user, tag=options.tag
    )


def _erase(options: argparse.Namespace) -> int:
    request = _erasure(options)
    with _bar("erasing") as progress:
        erased = erase_in(options.directory, request, progress)
    _say(
        f"{options.directory}: {erased.groups} groups, {erased.trajectories} trajectories, "
        f"{erased.turns} turns, {erased.rewards} rewards erased"
    )
    return 0


def _tell(damage: Iterator[Damage], whole: str) -> int:
    """Prints damage on stdout, one line each, and the count on stderr."""
    count = 0
    for count, one in enumerate(damage, start=1):
        if count <= SHOWN_DAMAGE:
            sys.stdout.write(f"{one}\n")
    if count == 0:
        _say(whole)
        return 0
    hidden = f", of which {SHOWN_DAMAGE} are shown" if count > SHOWN_DAMAGE else ""
    sys.stderr.write(f"forge: {count} records are damaged{hidden}\n")
    return DAMAGED


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


@contextmanager
def _bar(doing: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr if that is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(doing)
        yield lambda done, total: bar.update(task, completed=done, total=total)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
