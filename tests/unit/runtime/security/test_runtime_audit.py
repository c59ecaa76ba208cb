"""The audit log: its file, its lines, and the parts of a request that it names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forge.core.errors import ConfigError
from forge.runtime.security.audit import MAX_CHARS, MAX_IDS, configure_audit, targets_of
from forge.v1 import common_pb2, gateway_pb2, pool_pb2, scheduler_pb2

PROGRAM = """
import sys
from pathlib import Path
from forge.runtime.security.audit import configure_audit, write_audit
from forge.runtime.telemetry import configure_logging
from forge.runtime.security.tokens import Claims
configure_logging("scheduler", "s-1", level="error", file="")
configure_audit("scheduler", "s-1", file=sys.argv[1])
ada = Claims(subject="ada", scopes=frozenset({"operator"}), token_id="t1")
for code in ("OK", "UNAVAILABLE"):
    error = None if code == "OK" else ValueError("gone")
    write_audit("S/M", ada, peer="ipv4:10.0.0.1:5", code=code, error=error)
    if sys.argv[1] and code == "OK":
        Path(sys.argv[1]).rename(sys.argv[1] + ".1")
"""


def written(file: str) -> str:
    """Standard error of a process that writes two lines; it rotates the file between them."""
    argv = [sys.executable, "-c", PROGRAM, file]
    return subprocess.run(argv, stderr=subprocess.PIPE, text=True, check=True).stderr


def test_audit_lines_go_to_the_log_at_any_level() -> None:
    """If they have no file."""
    lines = [json.loads(line) for line in written("").splitlines()]
    assert [line["code"] for line in lines] == ["OK", "UNAVAILABLE"]


def test_audit_file_is_opened_again_after_a_rotation(tmp_path: Path) -> None:
    """logrotate needs no signal; the log has no copy."""
    assert written(str(tmp_path / "audit.log")) == ""
    lines = [json.loads((tmp_path / name).read_text()) for name in ("audit.log.1", "audit.log")]
    for line in lines:
        del line["timestamp"]
    first: dict[str, object] = {
        "event": "audit",
        "service": "scheduler",
        "instance": "s-1",
        "method": "S/M",
    }
    first |= {"subject": "ada", "token_id": "t1", "scopes": ["operator"], "targets": {}}
    first |= {"peer": "ipv4:10.0.0.1:5", "code": "OK", "error": ""}
    assert lines == [first, first | {"code": "UNAVAILABLE", "error": "gone"}]
    # Subjects and peers are for operators alone.
    assert not (tmp_path / "audit.log").stat().st_mode & 0o007


def test_unwritable_audit_file_is_one_line(tmp_path: Path) -> None:
    """A wrong setting, at the start."""
    with pytest.raises(ConfigError, match=r"audit_file = .*: No such file or directory"):
        configure_audit("pool", "p", file=str(tmp_path / "absent" / "audit.log"))


def test_audit_targets_are_ids_without_content() -> None:
    """Payloads and rewards stay in the pool; long lists and texts are cut."""
    tasks = [common_pb2.Task(task_id=f"t{n}", payload_json="secret") for n in range(MAX_IDS + 1)]
    targets = targets_of(scheduler_pb2.SubmitTasksRequest(tasks=tasks))
    assert targets == {"tasks": [f"t{n}" for n in range(MAX_IDS)], "tasks_count": MAX_IDS + 1}
    activity = scheduler_pb2.SetActivityRequest(activity=scheduler_pb2.ACTIVITY_PAUSED)
    assert targets_of(activity) == {"activity": "ACTIVITY_PAUSED"}
    closed = gateway_pb2.CloseSessionRequest(
        rewards=[common_pb2.RewardEvent(event_id="e", value=3)], abandon_reason="x" * 999
    )
    assert targets_of(closed) == {"rewards": ["e"], "abandon_reason": "x" * MAX_CHARS}
    query = pool_pb2.QueryTrajectoriesRequest(
        filter=pool_pb2.TrajectoryFilter(domain="d"), page_size=5
    )
    assert targets_of(query) == {"filter": "", "page_size": 5}
    states = scheduler_pb2.LeaseRolloutsRequest(domains=["a", "b"], leaving=True)
    assert targets_of(states) == {"domains": ["a", "b"], "leaving": True}
