"""The output of `forge trajectories` and of `forge pool` for a running pool."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
)
from rich.table import Table

from forge.cli.command_exit import console, say
from forge.cli.connection import Connection
from forge.cli.exports.files import JsonLines
from forge.cli.exports.trajectory_rows import TrajectoryRows
from forge.cli.options import SystemOptions
from forge.cli.pool.token_value_rows import ValuedRows, Values
from forge.cli.pool.trajectory_view import TrajectoryView
from forge.client.stored.pool import PoolReader
from forge.client.stored.rollout_tables import known_tables
from forge.client.stored.token_values import TokenValuesReader
from forge.core.clocks import local_time_text
from forge.core.enum_words import enum_word
from forge.core.errors import NotFound
from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2, pool_pb2

PENDING = 1
"""Exit code of an erasure that a replica has still to finish."""

_CHANGES = {
    pool_pb2.TRAJECTORY_CHANGE_CLOSED: "closed",
    pool_pb2.TRAJECTORY_CHANGE_REWARDED: "rewarded",
}


@asynccontextmanager
async def _reader(at: Connection) -> AsyncIterator[PoolReader]:
    async with at.open() as (coordinator, channels):
        yield PoolReader(coordinator, channels)


class _FirstRows:
    """Prints rows as lines of JSON, or collects them in a table, up to a limit; 0: all."""

    def __init__(self, table: Table, *, limit: int, as_json: bool) -> None:
        self._table = table
        self._more = False
        """True once there was a row beyond the limit."""
        self._limit = limit
        self._as_json = as_json
        self._shown = 0

    def add(self, rows: Iterable[tuple[Message, Sequence[str]]]) -> bool:
        """Add messages with their cells; False if there are more than the limit."""
        for message, cells in rows:
            if self._limit and self._shown == self._limit:
                self._more = True
                return False
            self._shown += 1
            if self._as_json:
                _print_json(message)
            else:
                self._table.add_row(*cells)
        return True

    def finish(self) -> None:
        """Print the table, and on stderr whether there are more rows."""
        if not self._as_json:
            console.print(self._table)
        if self._more:
            sys.stderr.write(f"There are more than these {self._limit}: see --limit.\n")


def _match_cells(match: pool_pb2.SearchTrajectoriesResponse.Match) -> list[str]:
    excerpt = " ".join(match.excerpt.split())
    return [*_cells(match.trajectory)[:4], str(match.turn_index), excerpt]


async def list_trajectories(
    at: Connection,
    wanted: pool_pb2.TrajectoryFilter,
    *,
    limit: int,
    as_json: bool,
) -> None:
    """Prints up to `limit` matching trajectories; 0: all."""
    found = _FirstRows(Table(*_COLUMNS), limit=limit, as_json=as_json)
    async with _reader(at) as reader:
        async for page in reader.query(wanted, page_size=limit):
            _name_damaged(page.shard, page.damaged)
            if not found.add((summary, _cells(summary)) for summary in page.trajectories):
                break
    found.finish()


async def search_trajectories(
    at: Connection,
    wanted: pool_pb2.TrajectoryFilter,
    text: str,
    *,
    limit: int,
    as_json: bool,
) -> None:
    """Prints up to `limit` matching trajectories that have a text, with the text in its place; 0:
    all."""
    found = _FirstRows(Table(*_COLUMNS[:4], "turn", "text"), limit=limit, as_json=as_json)
    freed = without_text = 0
    async with _reader(at) as reader:
        async for shard, page in reader.search(wanted, text, page_size=limit):
            _name_damaged(shard, page.damaged_trajectory_ids)
            freed += page.freed_trajectories
            without_text += page.turns_without_text
            if not found.add((match, _match_cells(match)) for match in page.matches):
                break
    found.finish()
    if freed or without_text:
        sys.stderr.write(
            f"Not searched: {freed} trajectories that were freed, {without_text} turns without "
            "messages on record\n"
        )


async def show_trajectory(
    at: Connection, trajectory_id: str, *, full: bool, with_values: bool, as_json: bool
) -> None:
    """Prints one trajectory, as a tree or as one line of an export; `with_values`: with the token
    values that the trainer stores. Raises `InvalidArgument` for a malformed id."""
    parse_trajectory_id(trajectory_id)
    values: Values | None = {} if with_values else None
    async with at.open() as (coordinator, channels):
        trajectory = await PoolReader(coordinator, channels).find(trajectory_id)
        if with_values:
            try:
                values = await TokenValuesReader(coordinator, channels).read(trajectory_id)
            except NotFound as error:
                sys.stderr.write(f"forge: {error}\n")
    if as_json:
        rows = TrajectoryRows() if values is None else ValuedRows(values)
        JsonLines(sys.stdout.buffer, rows).add(trajectory)
    else:
        console.print(TrajectoryView(trajectory, values).draw(full=full), highlight=False)


def _name_damaged(shard: str, trajectory_ids: Sequence[str]) -> None:
    for trajectory_id in trajectory_ids:
        sys.stderr.write(f"forge: {trajectory_id} of pool shard {shard} is damaged and skipped\n")


async def follow_trajectories(
    at: Connection,
    wanted: pool_pb2.TrajectoryFilter,
    *,
    cursors: Sequence[str],
    from_start: bool,
    as_json: bool,
) -> None:
    """Prints closed and rewarded trajectories until cancelled; then the cursors."""
    latest = {cursor.rpartition("/")[0]: cursor for cursor in cursors}
    async with _reader(at) as reader:
        try:
            async for response in reader.tail(wanted, cursors=latest, from_start=from_start):
                latest[response.cursor.rpartition("/")[0]] = response.cursor
                if not response.change:
                    continue
                if as_json:
                    _print_json(response)
                else:
                    cells = "  ".join(_cells(response.summary))
                    say(f"{_CHANGES[response.change]:8}  {cells}")
        finally:
            resume = " ".join(f"--cursor {cursor}" for cursor in latest.values())
            sys.stderr.write(f"Continue with: forge trajectories tail {resume}\n")


async def compact_shard(system: SystemOptions, shard: str, directory: Path) -> None:
    """Makes the pool compact the shard that it serves from `directory`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    last = pool_pb2.CompactShardResponse()
    with _bar(*columns) as bar:
        task = bar.add_task(f"compacting {shard}", total=None)
        async with (
            _reader(system.resolved()) as reader,
            aclosing(reader.compact(shard, data_dir=str(directory.resolve()))) as responses,
        ):
            async for last in responses:
                bar.update(task, completed=last.copied_bytes, total=last.total_bytes)
    say(f"{directory}: {decimal(last.before_bytes)} before, {decimal(last.after_bytes)} after")


async def erase_trajectories(
    system: SystemOptions, wanted: pool_pb2.EraseTrajectoriesRequest
) -> None:
    """Erases on every shard, and names trackers that may have the rollouts; exits with 1 if a file
    may still have erased bytes."""
    pending = False
    async with system.resolved().open() as (coordinator, channels):
        reader = PoolReader(coordinator, channels)
        async for shard in reader.erase(wanted):
            say(
                f"{shard.pool_shard}: {shard.groups} groups, {shard.trajectories} trajectories, "
                f"{shard.turns} turns, {shard.rewards} rewards erased"
            )
            for replica in shard.replicas:
                pending = pending or bool(replica.pending)
                state = f"pending: {replica.pending}" if replica.pending else "purged"
                say(f"  {replica.data_dir or 'the other replica'}: {state}")
        for place in await known_tables(coordinator):
            say(f"not erased: the tables of rollouts in {place}; delete its runs there")
    if pending:
        raise typer.Exit(PENDING)


async def show_stats(at: Connection, *, as_json: bool) -> None:
    """Prints the counts of every shard."""
    async with _reader(at) as reader:
        for shard in await reader.shards():
            stats = await reader.stats(shard)
            if as_json:
                _print_json(stats)
            else:
                _show(stats, reader.copies_in_sync(shard), reader.refusals(shard))


def _bar(*columns: ProgressColumn) -> Progress:
    """Returns a progress bar on stderr, disabled without a terminal."""
    stderr = Console(stderr=True)
    return Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)


def _counts(stats: pool_pb2.GetPoolStatsResponse) -> Table:
    table = Table(
        "domain",
        "",
        "state",
        "count",
        "turns",
        "sampled tokens",
        "bytes",
        title=f"Shard {stats.pool_shard}",
    )
    for groups in stats.group_counts:
        purpose = enum_word(common_pb2.Purpose, groups.purpose)
        state = enum_word(common_pb2.GroupState, groups.state)
        table.add_row(groups.domain, f"{purpose} groups", state, str(groups.groups), "", "", "")
    for one in stats.trajectory_counts:
        table.add_row(
            one.domain,
            "trajectories",
            _state(one.state),
            str(one.trajectories),
            str(one.turns),
            str(one.sampled_tokens),
            decimal(one.turn_bytes),
        )
    return table


def _show(stats: pool_pb2.GetPoolStatsResponse, copies: int, refusals: Sequence[str]) -> None:
    console.print(_counts(stats))
    say(
        f"{decimal(stats.used_bytes)} in the file, {decimal(stats.live_bytes)} of them in use; "
        f"{decimal(stats.disk_free_bytes)} free on the disk"
        + (f"; copies in sync: {copies}" if copies else "")
    )
    for refusal in refusals:
        say(refusal)
    if stats.oldest_pending_task_id:
        say(
            f"oldest pending group: {stats.oldest_pending_task_id} at index "
            f"{stats.oldest_pending_queue_index}"
            + (
                f"; oldest waiting seal {local_time_text(stats.oldest_pending_closed_unix_s)}"
                if stats.oldest_pending_closed_unix_s
                else ""
            )
        )


_COLUMNS = ("trajectory", "domain", "state", "closed", "turns", "sampled", "versions", "rewards")


def _cells(summary: common_pb2.TrajectorySummary) -> tuple[str, ...]:
    versions = f"{summary.min_weight_version}-{summary.max_weight_version}"
    rewards = " ".join(f"{reward.name}={reward.value:g}" for reward in summary.rewards)
    return (
        summary.trajectory_id,
        summary.domain,
        _state(summary.state) + (" (freed)" if summary.freed else ""),
        local_time_text(summary.sealed_unix_s) if summary.sealed_unix_s else "",
        str(summary.turns),
        str(summary.sampled_tokens),
        versions if summary.min_weight_version >= 0 else "",
        rewards or summary.reason,
    )


def _state(state: common_pb2.TrajectoryState.ValueType) -> str:
    return enum_word(common_pb2.TrajectoryState, state)


def _print_json(message: Message) -> None:
    row = MessageToDict(message, preserving_proto_field_name=True)
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
