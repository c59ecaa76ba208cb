"""Log lines on a full disk are dropped: an error would end the task that logs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from forge.runtime import telemetry

PROGRAM = """
import logging, sys
from forge.runtime.telemetry import configure_logging, log
configure_logging("pool", "pool-1", level="info", file=sys.argv[1])
log.warning("a")
logging.getLogger("grpc").error("b")
log.error("c", exc_info=ValueError("d"))
print("alive")
"""
FULL = "/dev/full"


@pytest.mark.parametrize("file", [FULL, ""])
def test_process_outlives_a_full_log(file: str) -> None:
    """A log file, or the stderr of its supervisor; the standard library's loggers too."""
    with Path(FULL).open("w") as stderr:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, file],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            check=True,
        )
    assert ended.stdout == "alive\n"


class Disk(io.StringIO):
    """A file on a disk with a number of free characters."""

    free = 10

    def write(self, text: str) -> int:
        written = super().write(text[: self.free])
        self.free -= written
        if written < len(text):
            raise OSError(28, "No space left on device")
        return written


def test_first_line_after_a_full_disk_is_whole() -> None:
    """It does not continue the line that the disk took in part."""
    disk = Disk()
    stream = telemetry._LogStream(cast(io.TextIOWrapper, disk))
    stream.write('{"event": "a"}\n')
    stream.write('{"event": "b"}\n')
    disk.free = 1000
    stream.write('{"event": "c"}\n')
    stream.write('{"event": "d"}\n')
    lines = disk.getvalue().splitlines()
    assert lines[0] == '{"event": '
    assert [json.loads(line)["event"] for line in lines[1:]] == ["c", "d"]
