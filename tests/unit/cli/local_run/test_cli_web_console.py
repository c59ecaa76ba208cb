"""The web console of commands: its arguments, its port, and that a run goes on without it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from forge.cli.connection import Connection
from forge.cli.local_run import web_console
from forge.cli.local_run.stack import READY_KINDS, Stack, StackPlan, members
from forge.cli.rundir import RunDirectory, RunState
from forge.core.errors import ConfigError
from forge.runtime.process.child_processes import ProcessEvent


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of the process that a command becomes."""
    found: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, argv: found.append(argv))
    return found


def test_console_of_a_run_has_its_key_and_its_tokenizer(
    tmp_path: Path, started: list[list[str]]
) -> None:
    """From the directory of the run."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.save(RunState(model="tiny", model_path="/models/tiny", seed=0, steps=1))
    at = Connection(etcd="127.0.0.1:1", cluster="run", key_file=run.key_file, run_dir=run.path)
    web_console.serve_console(at, host="127.0.0.1", port=7811, model_path="")
    (argv,) = started
    assert argv[1:3] == ["-m", "services.console"]
    assert {
        "--etcd=127.0.0.1:1",
        "--cluster=run",
        f"--key-file={run.key_file}",
        "--http.port=7811",
        "--model-path=/models/tiny",
    } <= {*argv}
    assert not [word for word in argv if word.endswith("=")]


def test_console_of_a_cluster_has_its_certificates(started: list[list[str]]) -> None:
    """Beyond loopback; without a model the texts of tokens are unknown."""
    at = Connection(
        etcd="https://etcd:2379",
        cluster="c",
        key_file=Path("key"),
        tls_ca="ca.pem",
        tls_cert="cert.pem",
        tls_key="key.pem",
    )
    web_console.serve_console(at, host="10.0.0.1", port=7811, model_path="")
    (argv,) = started
    assert {"--host=10.0.0.1", "--tls-ca=ca.pem", "--tls-cert=cert.pem"} <= {*argv}
    assert not [word for word in argv if word.startswith(("--model-path", "--insecure"))]


def test_console_names_a_port_in_use_before_its_address(
    started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the option of the command."""
    at = Connection(etcd="127.0.0.1:1", cluster="c", key_file=Path("key"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: another process listens there"):
            web_console.serve_console(at, host="127.0.0.1", port=port, model_path="")
    assert not started and not capsys.readouterr().out


def test_console_needs_the_key(started: list[list[str]]) -> None:
    """It verifies the tokens of its readers."""
    at = Connection(etcd="127.0.0.1:1", cluster="c")
    with pytest.raises(ConfigError, match="--key-file"):
        web_console.serve_console(at, host="127.0.0.1", port=None, model_path="")
    assert not started


def test_second_console_of_a_host_takes_another_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual one is in use."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(web_console, "PORT", port)
        assert web_console.free_port("127.0.0.1") != port
    assert web_console.free_port("127.0.0.1") == port


@pytest.mark.parametrize(
    ("host", "tls", "expected"),
    [
        ("127.0.0.1", False, "http://127.0.0.1:7/"),
        ("::1", True, "https://[::1]:7/"),
    ],
)
def test_address_is_what_a_browser_opens(host: str, tls: bool, expected: str) -> None:
    """With brackets around an IPv6 address."""
    assert web_console.address(host, 7, tls=tls) == expected


def plan(tmp_path: Path, **chosen: Any) -> StackPlan:
    return StackPlan(
        directory=RunDirectory(tmp_path), model_path="m", cluster="c", console=True, **chosen
    )


def test_run_serves_the_console_last_and_does_not_wait_for_it(tmp_path: Path) -> None:
    """On a port of its own, unless a setting names one; other stacks have none."""
    last = members(plan(tmp_path))[-1]
    assert (last.name, last.module) == ("console", "services.console")
    assert int(last.settings["http.port"]) > 0 and "console" not in READY_KINDS
    chosen = members(plan(tmp_path, settings={"console": {"http.port": "7811"}}))[-1]
    assert chosen.settings["http.port"] == "7811"
    without = StackPlan(directory=RunDirectory(tmp_path), model_path="m", cluster="c")
    assert "console" not in [member.name for member in members(without)]


async def test_run_goes_on_when_its_console_gives_up(tmp_path: Path) -> None:
    """Any other process that keeps crashing ends the run."""
    told: list[str] = []
    stack = Stack(plan(tmp_path), on_event=lambda event: told.append(event.name))
    stack._heard(ProcessEvent(name="console", kind="gave_up", pid=1, cause="exit code 1"))
    assert not stack._given_up.done()
    stack._heard(ProcessEvent(name="pool", kind="gave_up", pid=2, cause="exit code 1"))
    assert stack._given_up.done() and told == ["console", "pool"]
