"""Curves of other runs, from the files that they keep."""

from __future__ import annotations

from pathlib import Path

from services.console.config import ConsoleConfig
from services.console.data.compared_runs import ComparedRuns
from tests.support.console.page import served, write_metrics


async def test_compared_runs_are_read_from_their_directories(tmp_path: Path) -> None:
    """One without a file names the reason; the others are shown."""
    first = write_metrics(tmp_path / "first", 3)
    config = ConsoleConfig(compare=(str(first), str(tmp_path / "gone")))
    async with served(config) as console:
        status, (run, gone) = await console.get("/api/compared")
    assert status == 200
    assert (run["name"], run["error"]) == ("first", "")
    assert run["fields"] == ["step", "mean_reward", "entropy", "staleness_mean"]
    assert run["rows"] == [[1, 0.1, 0, 0], [2, 0.2, 0, 0], [3, 0.3, 0, 0]]
    assert gone["rows"] == [] and "does not exist" in gone["error"]


def test_long_run_is_thinned(tmp_path: Path) -> None:
    """To at most so many steps, over its whole length."""
    (run,) = ComparedRuns([str(write_metrics(tmp_path / "long", 25))], most=10).read()
    assert [row[0] for row in run["rows"]] == [1, 4, 7, 10, 13, 16, 19, 22, 25]
