"""`forge trajectories export`: reads trajectories page by page and writes their rows.

Owns the order of reads, the counts and the output. Counts or names every row that it leaves out.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress, SpinnerColumn, TextColumn

from forge.cli.command_exit import say
from forge.cli.connection import Connection
from forge.cli.exports.chat_rows import preference_rows, sft_row, sft_rows
from forge.cli.exports.files import RowFormat, export_file
from forge.cli.exports.formats import ExportFormat, ExportOptions
from forge.cli.exports.preference_pairs import GroupPairs
from forge.cli.exports.token_rows import TokenRows, token_rows
from forge.cli.exports.trajectory_rows import TrajectoryRows
from forge.client.group_credit import turn_advantages
from forge.client.reward_events import reward_sum
from forge.client.stored.conversations import conversations
from forge.client.stored.pool import Page, PoolReader
from forge.core.errors import InvalidArgument
from forge.v1 import common_pb2, pool_pb2

DAMAGED = 1
"""Exit code of an export that lacks damaged trajectories."""

_NOUNS = {
    ExportFormat.TRAJECTORIES: "trajectories",
    ExportFormat.SFT: "conversations",
    ExportFormat.PREFERENCE: "pairs",
    ExportFormat.TOKENS: "sequences",
}
_REASONS = {
    "no_messages": "without messages on record",
    "other_model": "of other models",
    "aborted": "left by the agent",
    "greedy": "sampled greedily",
    "empty": "without a prompt or an answer",
    "excluded": "excluded by the agent",
    "side_call": "that are side calls",
}


async def export_trajectories(
    at: Connection, wanted: pool_pb2.TrajectoryFilter, file: Path, options: ExportOptions
) -> None:
    """Writes the rows of all matching readable trajectories to `file`; exits with 1 if any is
    damaged."""
    rows = _row_format(options)
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    stderr = Console(stderr=True)
    with (
        export_file(file, rows) as writer,
        Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar,
    ):
        task = bar.add_task("exporting")
        async with at.open() as (coordinator, channels):
            reader = PoolReader(coordinator, channels)
            export = _EXPORTS[options.format](reader, wanted, options, writer.add)
            async for page in reader.query(wanted):
                await export.add_page(page)
                bar.update(task, description=f"{export.rows} {_NOUNS[options.format]}")
    say(f"{file}: {export.rows} {_NOUNS[options.format]}, {decimal(file.stat().st_size)}")
    for line in export.left_out():
        say(line)
    if export.damaged:
        raise typer.Exit(DAMAGED)


def _row_format(options: ExportOptions) -> RowFormat[Any]:
    if options.format is ExportFormat.SFT:
        return sft_rows(options.arguments.value)
    if options.format is ExportFormat.PREFERENCE:
        return preference_rows(options.arguments.value)
    return TokenRows() if options.format is ExportFormat.TOKENS else TrajectoryRows()


class _Export(ABC):
    """One export in progress."""

    def __init__(
        self,
        reader: PoolReader,
        wanted: pool_pb2.TrajectoryFilter,
        options: ExportOptions,
        write: Callable[[Any], None],
    ) -> None:
        self.reader = reader
        self.wanted = wanted
        self.options = options
        self.rows = 0
        self.damaged: set[str] = set()
        self.freed = 0
        self.turns: Counter[str] = Counter()
        """Turns without a row, by reason."""
        self._write = write

    @abstractmethod
    async def add_page(self, page: Page) -> None:
        """Writes the rows of a page of matching trajectories."""

    def write(self, rows: Iterable[Any]) -> None:
        """Writes rows."""
        for row in rows:
            self._write(row)
            self.rows += 1

    def name_damaged(self, shard: str, trajectory_ids: Iterable[str]) -> None:
        """Names damaged trajectories on stderr, each once."""
        for trajectory_id in trajectory_ids:
            if trajectory_id not in self.damaged:
                sys.stderr.write(
                    f"forge: {trajectory_id} of pool shard {shard} is damaged and skipped\n"
                )
                self.damaged.add(trajectory_id)

    def left_out(self) -> list[str]:
        """Returns one line for each kind of omission."""
        lines = [f"left out: {count} turns {_REASONS[why]}" for why, count in self.turns.items()]
        if self.freed:
            lines.append(f"left out: {self.freed} trajectories that were freed")
        return lines


class _WholeTrajectories(_Export):
    """Rows that one trajectory makes alone."""

    async def add_page(self, page: Page) -> None:
        """Fetches the trajectories of a page, one in memory at a time."""
        damaged = [*page.damaged]
        stored = [one.trajectory_id for one in page.trajectories if not one.freed]
        found = 0
        async for trajectory in self.reader.fetch(page.shard, stored, on_damage=damaged.append):
            found += 1
            self.write(await self.rows_of(page.shard, trajectory))
        self.name_damaged(page.shard, damaged)
        # Also those that were freed since the page was read.
        self.freed += len(page.trajectories) - found - (len(damaged) - len(page.damaged))

    async def rows_of(self, shard: str, trajectory: common_pb2.Trajectory) -> Sequence[Any]:
        """Returns the rows of a trajectory."""
        return [trajectory]


class _SftExport(_WholeTrajectories):
    """One row per conversation."""

    async def rows_of(self, shard: str, trajectory: common_pb2.Trajectory) -> Sequence[Any]:
        """Returns the rows of a trajectory."""
        try:
            talks, unused = conversations(trajectory.turns)
        except InvalidArgument:
            self.name_damaged(shard, [trajectory.trajectory_id])
            return []
        self.turns.update(unused)
        reward = reward_sum(trajectory.rewards, self.wanted.reward_name)
        return [
            sft_row(
                talk,
                trajectory_id=trajectory.trajectory_id,
                domain=trajectory.domain,
                reward=reward,
            )
            for talk in talks
        ]


class _TokenExport(_WholeTrajectories):
    """One row per sequence of tokens."""

    _group = ("", "")
    """Shard and task of the group whose advantages are at hand."""
    _credit: Mapping[str, Sequence[float]] = {}

    async def rows_of(self, shard: str, trajectory: common_pb2.Trajectory) -> Sequence[Any]:
        """Returns the rows of a trajectory."""
        task_id = trajectory.trajectory_id.partition(":")[0]
        if self._group != (shard, task_id):
            # All of the group: the mean does not depend on the filter.
            group = await self.reader.group(shard, task_id, pool_pb2.TrajectoryFilter())
            self._group, self._credit = (shard, task_id), turn_advantages(group.trajectories)
            self.name_damaged(shard, group.damaged)
        advantages = self._credit.get(trajectory.trajectory_id)
        if advantages is None or len(advantages) != len(trajectory.turns):
            advantages = [float("nan")] * len(trajectory.turns)
        reward = reward_sum(trajectory.rewards, self.wanted.reward_name)
        try:
            rows, untrained = token_rows(trajectory, advantages, reward)
        except InvalidArgument:
            self.name_damaged(shard, [trajectory.trajectory_id])
            return []
        self.turns.update(untrained)
        return rows


class _PreferenceExport(_Export):
    """One row per pair of rollouts of a task."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._pairs = GroupPairs(
            self.reader,
            self.wanted,
            margin=self.options.margin,
            most=self.options.pairs_per_group,
            on_damage=self.name_damaged,
        )

    async def add_page(self, page: Page) -> None:
        """Writes the pairs of the groups that begin on a page."""
        self.name_damaged(page.shard, page.damaged)
        for one in page.trajectories:
            self.write(await self._pairs.beginning_with(page.shard, one))

    def left_out(self) -> list[str]:
        """Returns one line for each kind of omission."""
        pairs = self._pairs
        self.freed = pairs.freed
        lines = super().left_out()
        if pairs.close:
            lines.append(f"left out: {pairs.close} groups without a difference of rewards")
        if pairs.unlike:
            lines.append(
                f"left out: {pairs.unlike} groups whose pairs have no common prompt, other "
                "tools, or no messages on record"
            )
        return lines


_EXPORTS: Mapping[ExportFormat, type[_Export]] = {
    ExportFormat.TRAJECTORIES: _WholeTrajectories,
    ExportFormat.SFT: _SftExport,
    ExportFormat.PREFERENCE: _PreferenceExport,
    ExportFormat.TOKENS: _TokenExport,
}
