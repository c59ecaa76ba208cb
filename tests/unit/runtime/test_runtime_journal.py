"""Log lines in the journal of systemd have the level of the event as their priority."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging
from forge.runtime.telemetry import configure_logging, log
configure_logging("pool", "pool-1", level="debug", file="")
log.debug("a")
log.info("b")
log.warning("c")
log.error("d")
logging.getLogger("grpc").error("e")
"""


def lines_of(journal: str, tmp_path: Path) -> list[str]:
    """What a process logs whose JOURNAL_STREAM is `journal`; {} stands for its stderr."""
    errors = tmp_path / "stderr"
    with errors.open("w") as stderr:
        status = os.fstat(stderr.fileno())
        stream = journal.format(f"{status.st_dev}:{status.st_ino}")
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "JOURNAL_STREAM": stream},
            stderr=stderr,
            check=True,
        )
    return errors.read_text().splitlines()


def test_lines_in_the_journal_have_priorities(tmp_path: Path) -> None:
    """`journalctl --priority warning` shows warnings and errors, also of libraries."""
    lines = lines_of("{}", tmp_path)
    assert [line[:3] for line in lines] == ["<7>", "<6>", "<4>", "<3>", "<3>"]
    assert json.loads(lines[2][3:])["event"] == "c"


def test_lines_outside_the_journal_are_json_alone(tmp_path: Path) -> None:
    """On a stderr that is not the journal's."""
    assert [json.loads(line)["event"] for line in lines_of("1:2", tmp_path)] == [*"abcde"]
