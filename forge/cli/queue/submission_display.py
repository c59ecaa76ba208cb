"""The output of `forge queue submit`: progress, outages, and the states of all tasks at the end.

Owns the connection and the notifications to systemd, too; `forge.cli.queue.submitting` submits.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack

import sdnotify
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from forge.cli.command_exit import console
from forge.cli.connection import Connection
from forge.cli.queue.outages import Outages
from forge.cli.queue.submission import Submission
from forge.cli.queue.submitting import Counts, Submitter
from forge.cli.trouble import tombstone_lines
from forge.client.operator import Operator
from forge.core.errors import InvalidArgument
from forge.core.tasks.dataset_cursor import DatasetCursor
from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.process.watchdog import feed_watchdog, limit_s

DONE = ("trained", "tombstoned", "evaluated")
_FIND_S = 1.0
"""Longest wait for a leader until its absence is reported."""
_LINES = 10
"""Lines of progress per epoch where no bar can be shown."""


async def submit_file(at: Connection, submission: Submission) -> None:
    """Submits a file to its end, and prints a summary. Raises ForgeError; InvalidArgument also
    after the end, if the scheduler refused a task."""
    systemd = sdnotify.SystemdNotifier()

    def report(text: str) -> None:
        systemd.notify(f"STATUS={text}")
        console.print(Text(text, style="yellow"), soft_wrap=True)

    outages = Outages(report, longest_s=submission.timeout_s)
    submitter = Submitter(submission, outages)
    systemd.notify("READY=1")
    async with AsyncExitStack() as stack:
        if watchdog_s := limit_s(os.environ):
            beats = feed_watchdog(systemd, ActorSystem("submit"), watchdog_s)
            stack.callback(asyncio.create_task(beats).cancel)
        coordinator, channels = await outages.outlast(lambda: stack.enter_async_context(at.open()))
        display = stack.enter_context(_Display(submission, rows=submitter.rows))
        # Without retries: `outages` repeats, and reports it.
        operator = Operator(coordinator, channels, retry_for_s=0.0, find_s=_FIND_S)
        await submitter.run(operator, display.show)
    if submitter.counts.refused:
        raise InvalidArgument(f"{submitter.counts.refused} tasks were refused")


class _Display:
    """A bar on a terminal, lines elsewhere; the summary at the end, however it ends."""

    def __init__(self, submission: Submission, *, rows: int) -> None:
        self._name = submission.name
        self._epochs = submission.epochs
        self._rows = rows
        self._counts: Counts | None = None
        self._said = -1
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task(self._name, total=rows * submission.epochs or None)

    def __enter__(self) -> _Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._counts is not None:
            _print_summary(self._name, self._counts)

    def show(self, cursor: DatasetCursor, counts: Counts) -> None:
        """Shows the progress."""
        submitted = counts.phases.total() + counts.accepted + counts.refused
        if self._counts is None and counts.phases:
            console.print(Text(_earlier_line(self._name, counts)), soft_wrap=True)
        self._counts = counts
        text = f"{self._name}, epoch {cursor.epoch}"
        self._bar.update(self._task, completed=submitted, description=text)
        part = submitted * _LINES // self._rows
        if self._bar.disable and part != self._said:
            self._said = part
            of_all = f" of {self._rows * self._epochs}" if self._epochs else ""
            console.print(f"{text}: {submitted}{of_all} tasks submitted", soft_wrap=True)


def _earlier_line(name: str, counts: Counts) -> str:
    phases = ", ".join(f"{groups} {phase}" for phase, groups in counts.phases.most_common())
    return f"{name}: {counts.phases.total()} tasks were submitted before: {phases}"


def _print_summary(name: str, counts: Counts) -> None:
    """Prints the number of tasks by state, and the reasons of tombstones and refusals. The states
    are those at the start of the command."""
    phases = counts.phases
    done = sum(phases[phase] for phase in DONE)
    queued = phases["queued"]
    by_done = ", ".join(f"{phases[phase]} {phase}" for phase in DONE if phases[phase])
    lines = [
        f"{name}: {counts.accepted} new, {queued} already queued, "
        f"{phases.total() - queued - done} already in flight, {done} already done"
        + (f" ({by_done})" if by_done else "")
        + f", {counts.refused} refused",
        *tombstone_lines(counts.tombstones.values()),
        *(f"refused: {reason}" for reason in counts.refusals),
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
