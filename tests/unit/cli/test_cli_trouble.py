"""The lines about a stall and about an unreachable pool shard."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from forge.cli.local_run.campaign import Progress
from forge.cli.local_run.display import RunDisplay
from forge.cli.trouble import troubles
from forge.v1 import scheduler_pb2

STALLED = scheduler_pb2.GetSchedulerStatusResponse(
    untrained_s=300.0,
    stall=scheduler_pb2.Stall(cause="no_runner", text="no runner has called for 90 s."),
)
AWAY = scheduler_pb2.GetSchedulerStatusResponse(shards_away=["1"])
WELL = scheduler_pb2.GetSchedulerStatusResponse(untrained_s=3.0)


def shown(*looks: scheduler_pb2.GetSchedulerStatusResponse) -> str:
    """What `forge run` prints over some looks at the scheduler."""
    console = Console(file=StringIO(), width=400)
    with RunDisplay(console, total_steps=1) as display:
        for look in looks:
            display.update(Progress(phase="train", scheduler=look))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_run_reports_a_stall_once() -> None:
    """And its end once."""
    text = "No group was trained for 5 min: no runner has called for 90 s."
    assert shown(STALLED, STALLED).count(text) == 1
    assert shown(STALLED, WELL, STALLED).count(text) == 2


def test_run_names_the_shard_that_is_awaited() -> None:
    """Training continues without it, so no other line shows it."""
    assert "Unreachable: pool shard 1." in shown(AWAY)


def test_run_without_a_stall_reports_none() -> None:
    """Nor before the scheduler has answered."""
    assert troubles(WELL) == {}
    assert troubles(None) == {}
