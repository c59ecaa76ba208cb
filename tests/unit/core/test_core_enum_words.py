"""Names of enum values, also of those that a newer peer has added."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.console import Console

import forge
from forge.cli.exports.files import export_file
from forge.cli.exports.trajectory_rows import TrajectoryRows
from forge.cli.pool.trajectory_view import TrajectoryView
from forge.core.enum_words import enum_name, enum_word
from forge.v1 import common_pb2 as pb
from forge.v1 import pool_pb2, scheduler_pb2
from services.console.data.overview import scheduler_row
from services.console.data.tasks_view import domain_rows
from services.console.data.trajectories.rows import summary_row
from tests.support.pool.records import make_reward, make_turn

NEWER = 9
"""A value that no enum of this release has."""


def test_name_and_word_of_known_and_unknown_values() -> None:
    """The number of an unknown value stays visible."""
    assert enum_name(pb.FinishReason, pb.FINISH_REASON_STOP) == "FINISH_REASON_STOP"
    assert enum_name(pb.FinishReason, NEWER) == "FINISH_REASON_UNKNOWN_9"
    assert enum_word(pb.FinishReason, pb.FINISH_REASON_STOP) == "stop"
    assert enum_word(pb.FinishReason, 0) == "unspecified"
    assert enum_word(scheduler_pb2.Activity, NEWER) == "unknown_9"


def newer_trajectory() -> pb.Trajectory:
    turn = make_turn()
    reward = make_reward()
    turn.finish_reason = reward.kind = NEWER  # type: ignore[assignment]
    return pb.Trajectory(
        trajectory_id="task:0:0",
        domain="code",
        state=NEWER,  # type: ignore[arg-type]
        turns=[turn],
        rewards=[reward],
    )


def test_trajectory_of_a_newer_peer_is_exported(tmp_path: Path) -> None:
    """State, finish reason and kind of reward are named by their numbers."""
    file = tmp_path / "rows.jsonl"
    with export_file(file, TrajectoryRows()) as writer:
        writer.add(newer_trajectory())
    (row,) = [json.loads(line) for line in file.open()]
    assert row["state"] == "unknown_9"
    assert [turn["finish_reason"] for turn in row["turns"]] == ["unknown_9"]
    assert [reward["kind"] for reward in row["rewards"]] == ["unknown_9"]


def test_trajectory_of_a_newer_peer_is_displayed() -> None:
    """`forge pool show` prints it."""
    console = Console(width=120, record=True)
    console.print(TrajectoryView(newer_trajectory()).draw())
    assert console.export_text().count("unknown_9") >= 2


def test_console_shows_states_of_newer_peers() -> None:
    """Pages of domains, trajectories and the scheduler show unknown states by number."""
    summary = pb.TrajectorySummary(trajectory_id="task:0:0", state=NEWER)  # type: ignore[arg-type]
    assert summary_row(summary)["state"] == "unknown_9"
    status = scheduler_pb2.GetSchedulerStatusResponse(activity=NEWER)  # type: ignore[arg-type]
    assert scheduler_row(status)["activity"] == "unknown_9"
    stats = pool_pb2.GetPoolStatsResponse()
    stats.group_counts.add(domain="code", state=NEWER, groups=2)
    (row,) = domain_rows(status, [stats])
    assert row["groups"] == {"unknown_9": 2}


def test_no_code_names_enum_values_by_protobuf() -> None:
    """`Enum.Name` raises on a value of a newer peer."""
    root = Path(forge.__file__).parents[1]
    calls = re.compile(r"\b\w*pb2?\.\w+\.Name\(")
    found = [
        str(file.relative_to(root))
        for folder in ("forge", "services")
        for file in (root / folder).rglob("*.py")
        if calls.search(file.read_text()) and "v1" not in file.parts
    ]
    assert not found
