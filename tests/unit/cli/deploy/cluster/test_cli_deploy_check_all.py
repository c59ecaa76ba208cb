"""`forge deploy check --out`: the answers of all hosts, and those that gave none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from forge.cli.deploy.cluster import transport
from forge.cli.deploy.cluster.transport import Ended, Transport
from forge.cli.deploy.host.check import as_json
from forge.cli.deploy.host.host import HostDirectory
from forge.cli.finding import Finding
from forge.cli.main import app
from tests.support.deploy.inventories import SMALL, rendered

CLOCK = Finding(ok=False, text="clock of 10.0.0.9 is off", remedy="On the host, chronyc makestep.")
UNIT = Finding(ok=False, text="forge-scheduler@1.service is failed", remedy="systemctl restart it")
SOUND = Finding(ok=True, text="ports")
UNKNOWN = Finding(ok=True, was_run=False, text="clock: timedatectl gives no answer")


@dataclass(frozen=True, slots=True)
class Answering:
    """A host that answers each command in the same way."""

    ended: Ended

    def run(self, words: Sequence[str], *, stdin: bytes = b"", limit_s: float = 60.0) -> Ended:
        assert list(words[:2]) == ["sh", "-c"] and words[-1] == "/opt/forge/.venv/bin/python"
        return self.ended


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rendered")
    rendered(SMALL, out)
    return out


def answer(out: Path, host: str, *findings: Finding, **changes: Any) -> Ended:
    """As the command prints it on the host, with a line of a library before."""
    shown = json.loads(as_json(HostDirectory(folder=out / "hosts" / host), findings))
    text = f"a warning\n{json.dumps(shown | changes)}\n"
    return Ended(code=0 if shown["ok"] else 1, output=text)


def checked(
    out: Path, answers: Mapping[str, Ended], monkeypatch: pytest.MonkeyPatch, *words: str
) -> Result:
    """One run of the command. The logins of the inventory name the hosts."""

    def transport_for(login: str) -> Transport:
        host = {"root@10.0.0.1": "alpha", "root@10.0.0.2": "beta"}[login]
        return Answering(answers[host])

    monkeypatch.setattr(transport, "transport_for", transport_for)
    return CliRunner().invoke(app, ["deploy", "check", "--out", str(out), *words])


def test_sound_hosts_are_a_table(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row each, and exit code 0; what a host could not check has a line."""
    answers = {host: answer(out, host, SOUND, UNKNOWN) for host in ("alpha", "beta")}
    ended = checked(out, answers, monkeypatch)
    assert ended.exit_code == 0, ended.output
    rows = [line.split() for line in ended.output.splitlines()]
    assert rows[1] == ["alpha", "10.0.0.1", "0.1.0", "3", "as", "rendered"]
    assert rows[2] == ["beta", "10.0.0.2", "0.1.0", "1", "as", "rendered"]
    assert ended.output.splitlines()[3:] == [f"--  alpha, beta: {UNKNOWN.text}"]


def test_difference_of_several_hosts_is_one_line(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their names and the remedy; exit code 1."""
    answers = {
        "alpha": answer(out, "alpha", CLOCK, UNIT, SOUND),
        "beta": answer(out, "beta", CLOCK),
    }
    ended = checked(out, answers, monkeypatch)
    assert ended.exit_code == 1
    assert "2 differences" in ended.output and "1 difference " in ended.output
    assert ended.output.splitlines()[3:] == [
        f"BAD alpha, beta: {CLOCK.text}",
        f"    {CLOCK.remedy}",
        f"BAD alpha: {UNIT.text}",
        f"    {UNIT.remedy}",
    ]


@pytest.mark.parametrize(
    ("ended", "state", "text"),
    [
        (Ended(code=127, output=""), "not checked", "beta: no release of forge is installed"),
        (
            Ended(code=255, output="", errors="ssh root@10.0.0.2: Connection refused"),
            "not checked",
            "beta: not checked: ssh root@10.0.0.2: Connection refused",
        ),
        (
            Ended(code=2, output="", errors="forge: /etc/forge/deploy/manifest.json: No such file"),
            "not checked",
            "manifest.json: No such file",
        ),
        (Ended(code=0, output="{}"), "not checked", "beta: not checked"),
    ],
)
def test_host_without_an_answer_is_not_well(
    out: Path, monkeypatch: pytest.MonkeyPatch, ended: Ended, state: str, text: str
) -> None:
    """It is named with the reason, and the other hosts are checked."""
    answers = {"alpha": answer(out, "alpha", SOUND), "beta": ended}
    found = checked(out, answers, monkeypatch)
    assert found.exit_code == 1
    assert state in found.output and text in found.output and "as rendered" in found.output
    shown = json.loads(checked(out, answers, monkeypatch, "--json").output)
    assert not shown["ok"]
    assert [(one["host"], one["ok"], one["was_checked"]) for one in shown["hosts"]] == [
        ("alpha", True, True),
        ("beta", False, False),
    ]


def test_host_without_the_last_render_differs(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as its own files say, and these are older. An older release says nothing of them."""
    answers = {
        "alpha": answer(out, "alpha", SOUND, manifest="0" * 64),
        "beta": answer(out, "beta", SOUND),
    }
    ended = checked(out, answers, monkeypatch)
    assert ended.exit_code == 1 and "alpha: the last render is not installed" in ended.output
    shown = json.loads(answers["alpha"].output.splitlines()[1])
    del shown["manifest"]
    answers["alpha"] = Ended(code=0, output=json.dumps(shown))
    assert checked(out, answers, monkeypatch).exit_code == 0


def test_check_is_of_one_host_or_of_all(out: Path) -> None:
    """Both options are refused."""
    words = ["deploy", "check", "--out", str(out), "--folder", str(out)]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 2 and "name one of them" in ended.output
