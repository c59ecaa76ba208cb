"""Cost of processes: CPU seconds and resident memory, read from /proc."""

from __future__ import annotations

from pathlib import Path

import psutil


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children, all threads, to the nanosecond.

    `cpu_times` counts in ticks of 10 ms, which is more than many calls take.
    """
    process = psutil.Process(pid)
    tree = [process, *process.children(recursive=True)]
    return sum(_own_cpu_s(one.pid) for one in tree)


def rss_bytes(pid: int) -> int:
    """Resident memory of a process and its children."""
    process = psutil.Process(pid)
    tree = [process, *process.children(recursive=True)]
    return sum(int(one.memory_info().rss) for one in tree)


def _own_cpu_s(pid: int) -> float:
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total_ns += int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:
            continue  # the thread has ended
    return total_ns / 1e9
