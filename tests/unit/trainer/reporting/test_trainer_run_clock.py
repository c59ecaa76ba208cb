"""The time of a run: what its file keeps, and what it does without one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog

from services.trainer.reporting.run_clock import RunClock


@dataclass
class Time:
    """A machine's two clocks; the monotonic one means nothing across processes."""

    unix_s: float = 1e9
    monotonic_s: float = 50.0

    def passes(self, seconds: float) -> None:
        self.unix_s += seconds
        self.monotonic_s += seconds

    def clock(self, file: Path | None) -> RunClock:
        """Of a new process."""
        return RunClock(file, unix_s=lambda: self.unix_s, monotonic_s=lambda: self.monotonic_s)


@pytest.fixture
def now() -> Time:
    return Time()


def test_run_time_continues_in_the_next_process(now: Time, tmp_path: Path) -> None:
    """The time between a crash and the next start counts, and a second `begin` does not."""
    file = tmp_path / "checkpoints" / "run-clock.json"
    first = now.clock(file)
    assert first.run_s() == 0
    now.passes(5)
    first.begin(0.0)
    now.passes(20)
    first.begin(0.0)
    assert first.run_s() == pytest.approx(20)
    now.passes(10)
    now.monotonic_s = 3.0
    second = now.clock(file)
    now.passes(2)
    second.begin(20.0)
    assert second.run_s() == pytest.approx(32)


def test_stops_on_purpose_do_not_count(now: Time, tmp_path: Path) -> None:
    """Each time from the stop to the next process; loading in that process counts again."""
    file = tmp_path / "run-clock.json"
    for run_s in (10, 22, 34):
        clock = now.clock(file)
        now.passes(0 if run_s == 10 else 2)
        clock.begin(0.0)
        now.passes(10)
        assert clock.run_s() == pytest.approx(run_s)
        clock.stop()
        now.passes(1000)


def test_set_clock_does_not_change_the_run_time(now: Time, tmp_path: Path) -> None:
    """Within a process."""
    clock = now.clock(tmp_path / "run-clock.json")
    clock.begin(0.0)
    now.unix_s += 1e6
    now.monotonic_s += 7
    assert clock.run_s() == pytest.approx(7)


def test_clock_set_back_does_not_reduce_the_run_time(now: Time, tmp_path: Path) -> None:
    """A step never ends before the previous one."""
    file = tmp_path / "run-clock.json"
    now.clock(file).begin(0.0)
    now.unix_s -= 500
    clock = now.clock(file)
    clock.begin(40.0)
    assert clock.run_s() == pytest.approx(40)


@pytest.mark.parametrize("text", ["", "[]", '{"began_unix_s": "x"}', '{"began_unix_s": NaN}', None])
def test_run_time_without_its_file_continues_from_the_last_step(
    now: Time, tmp_path: Path, text: str | None
) -> None:
    """The file is missing, damaged or of another program: earlier losses are unknown, and later
    crashes count."""
    file = tmp_path / "run-clock.json"
    if text is not None:
        file.write_text(text)
    with structlog.testing.capture_logs() as logged:
        now.clock(file).begin(100.0)
    assert [line["event"] for line in logged] == ["run_clock_unreadable"] * (text is not None)
    now.passes(5)
    clock = now.clock(file)
    clock.begin(100.0)
    assert clock.run_s() == pytest.approx(105)


def test_run_time_continues_in_memory_on_a_full_disk(now: Time, tmp_path: Path) -> None:
    """The log says that it cannot be written."""
    (tmp_path / "file").write_text("")
    clock = now.clock(tmp_path / "file" / "run-clock.json")
    with structlog.testing.capture_logs() as logged:
        clock.begin(0.0)
        now.passes(3)
        clock.stop()
    assert clock.run_s() == pytest.approx(3)
    assert {line["event"] for line in logged} == {"run_clock_not_written"}
