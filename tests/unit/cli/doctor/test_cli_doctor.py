"""What `forge doctor` says about the sandboxes of this machine."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from forge.agents.sandbox import bubblewrap
from forge.agents.sandbox.program_sandbox import Sandbox
from forge.cli.doctor import machine as doctor
from forge.cli.finding import Finding
from forge.core.errors import FailedPrecondition


def test_missing_sandbox_of_commands_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names what is missing; with it, the line names the strength."""

    def absent() -> str:
        raise FailedPrecondition("there is no bwrap")

    monkeypatch.setattr(bubblewrap, "executable", absent)
    finding = doctor._process_sandbox()
    assert not finding.ok
    assert "commands and reward functions: there is no bwrap" in finding.text
    assert "install bubblewrap" in finding.remedy


def test_sandbox_that_hangs_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of it is left running, and it is not tried without /proc."""
    starts, bwrap = tmp_path / "starts", tmp_path / "bwrap"
    starts.touch()
    bwrap.write_text(f"#!/bin/sh\necho $$ >> {starts}\nsleep 600\n")
    bwrap.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "executable", lambda: str(bwrap))
    monkeypatch.setattr(bubblewrap, "PROBE_S", 0.5)
    monkeypatch.setattr(doctor, "SANDBOX", Sandbox())
    assert "no end after 0.5 s" in doctor._sandbox().text
    finding = doctor._process_sandbox()
    expected = "no sandbox for commands and reward functions: bwrap has not ended within 0.5 s"
    assert (finding.ok, finding.text) == (False, expected)
    pids = [int(pid) for pid in starts.read_text().split()]
    assert len(pids) <= 3 and not any(psutil.pid_exists(pid) for pid in pids)


def test_absent_control_groups_are_named_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no fault: resource limits replace them."""

    def absent() -> Path:
        raise FailedPrecondition("it is not delegated")

    monkeypatch.setattr(doctor, "delegated_group", absent)
    finding = doctor.control_groups()
    assert finding.ok
    assert "resource limits instead: it is not delegated" in finding.text


def test_container_engine_is_named_or_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """podman before docker; an engine without its daemon says so."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither podman nor docker" in doctor.containers().text
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho 'no daemon' >&2\nexit 1\n")
    docker.chmod(0o755)
    assert doctor.containers().text.endswith("docker version: no daemon")
    podman = tmp_path / "podman"
    podman.write_text("#!/bin/sh\n")
    podman.chmod(0o755)
    assert doctor.containers().text.endswith(": podman")


def test_absent_torch_is_to_install_and_not_to_reinstall(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip cannot mend what is not installed."""
    monkeypatch.setattr(doctor, "missing_packages", lambda _: {"torch"})
    finding = doctor._torch()
    assert (finding.ok, finding.text) == (False, "torch is not installed")
    assert "pip install 'forge-rl[all]'" in finding.remedy


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("Unable to open /dev/urandom", "Give this process a complete /dev"),
        ("/opt/torch/lib/libtorch.so: undefined symbol: at", "Reinstall it"),
        ("/home/ada/dev/torch/lib/libtorch.so: undefined symbol: at", "Reinstall it"),
    ],
)
def test_remedy_of_a_failed_torch_fits_its_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str, remedy: str
) -> None:
    """pip cannot mend a container without devices."""
    (tmp_path / "torch.py").write_text(f"raise RuntimeError({error!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = doctor._torch()
    assert finding.text == f"torch cannot be imported: RuntimeError: {error}"
    assert finding.remedy.startswith(remedy)


def test_check_that_fails_itself_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /dev or /proc, as in a bare container: the other checks follow, with no traceback."""

    def absent() -> object:
        raise FileNotFoundError(2, "No such file or directory", "/dev/null")

    def unreadable() -> object:
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    monkeypatch.setattr(doctor, "_packages", absent)
    monkeypatch.setattr(doctor, "_torch", lambda: Finding(ok=True, text="torch"))
    monkeypatch.setattr(psutil, "virtual_memory", unreadable)
    found = list(doctor.examine(Path()))
    problems = [one.text for one in found if not one.ok and "the check failed" in one.text]
    assert problems == [
        "packages: the check failed: [Errno 2] No such file or directory: '/dev/null'",
        "memory: the check failed: [Errno 13] Permission denied: '/proc/meminfo'",
    ]
    assert found[-1].text.startswith(("containers", "no containers"))
