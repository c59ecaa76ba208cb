"""What `forge doctor --settings` says about instances, ports and certificates."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from forge.cli import service_settings
from forge.cli.certificate_doctor import CertificateFiles, certificate_findings
from forge.cli.service_settings import PrintedSettings, Program, print_settings, programs_in
from forge.cli.settings_doctor import settings_findings
from forge.core.errors import InvalidArgument
from tests.support.runtime.etcd import Certificates

SYSTEMCTL = """#!/bin/sh
case "$1" in
list-units) echo "forge-pool@1.service loaded active running Forge pool (1)"
            echo "forge-pool-replica@2.service loaded failed failed Forge pool replica (2)" ;;
show) echo "PYTHONUNBUFFERED=1 FORGE_PORT=7211 'FORGE_DATA_DIR=/var/lib/my forge'" ;;
esac
"""


def printed(name: str, text: str, *, errors: Sequence[str] = ()) -> PrintedSettings:
    program = Program(name=name, module=f"services.{name}", flags=(), source=f"{name}.toml")
    return PrintedSettings(program=program, text=text, errors=tuple(errors))


def problems(*services: PrintedSettings) -> dict[str, str]:
    return {one.text: one.remedy for one in settings_findings(services) if not one.ok}


def test_instances_of_units_have_the_variables_of_unit_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of an instance wins; a service without a unit is checked by its file alone."""
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(SYSTEMCTL)
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(service_settings, "UNIT_SETTINGS", tmp_path)
    (tmp_path / "pool.toml").touch()
    (tmp_path / "gateway.toml").touch()
    (tmp_path / "pool@1.env").write_text("# its own port\nFORGE_PORT=7300\n")
    (tmp_path / "pool-replica.env").write_text("FORGE_PORT=7400\nFORGE_DATA_DIR=/mnt/pool\n")
    found = {one.name: one for one in programs_in(tmp_path)}
    assert [*found] == ["gateway", "pool@1", "pool-replica@2"]
    assert found["pool@1"].environ["FORGE_PORT"] == "7300"
    assert found["pool@1"].environ["FORGE_DATA_DIR"] == "/var/lib/my forge"
    assert found["pool-replica@2"].module == "services.pool"
    assert found["pool-replica@2"].environ["FORGE_DATA_DIR"] == "/mnt/pool"
    assert found["gateway"].environ == {}


def test_directory_without_settings_is_refused(tmp_path: Path) -> None:
    """The error names the files."""
    with pytest.raises(InvalidArgument, match="has no settings of a service"):
        programs_in(tmp_path)


def test_service_that_is_still_busy_has_no_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its remedy is less load; that of a wrong setting is the file."""
    monkeypatch.setattr(service_settings, "_LIMIT_S", 0.001)
    program = Program(name="pool", module="services.pool", flags=(), source="pool.toml")
    (slow,) = print_settings([program], check=True)
    found = problems(slow, printed("gateway", "", errors=["port = 'x' is not a number"]))
    assert [*found] == ["pool: no end within 0.001 s", "gateway: port = 'x' is not a number"]
    assert "repeat the command under less load" in found["pool: no end within 0.001 s"]
    assert "Correct it in gateway.toml" in found["gateway: port = 'x' is not a number"]


def test_port_of_two_services_is_a_problem() -> None:
    """Its remedy names the file of one of them."""
    pool = printed("pool", 'host = "127.0.0.1"\nport = 7211\n')
    console = printed("console", 'host = "127.0.0.1"\n[http]\nport = 7211\n')
    found = problems(pool, console)
    assert [*found] == ["port 7211 is port of pool and http.port of console"]
    assert "console.toml" in found["port 7211 is port of pool and http.port of console"]


def test_host_of_another_machine_is_a_problem() -> None:
    """No process uses the port; the remedy names the file."""
    found = problems(printed("pool", 'host = "203.0.113.1"\nport = 7211\n'))
    (text,) = (text for text in found if text.startswith("port 7211"))
    assert "on 203.0.113.1: cannot assign" in text
    assert found[text] == "Set a host of this machine, and a port, in pool.toml."


def test_port_in_use_by_its_own_service_is_no_problem() -> None:
    """`--check` reports it too: the doctor of a running host passes over that line."""
    listen = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
    listen += "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", listen, "services.pool"]
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as served:
        assert served.stdout is not None
        port = int(served.stdout.readline())
        taken = f"port = {port}: address already in use on 127.0.0.1; choose another"
        text = f'host = "127.0.0.1"\nport = {port}\n'
        assert not problems(printed("pool", text, errors=[taken]))
        (other,) = problems(printed("gateway", text))
        assert f"by {Path(sys.executable).resolve().name}" in other or "by python" in other
        served.communicate()


def test_plain_tcp_beyond_loopback_is_a_problem() -> None:
    """Even where the setting `insecure` allows it."""
    (found,) = problems(printed("pool", 'host = "10.0.0.9"\ninsecure = true\n'))
    assert found == "no TLS beyond loopback: pool"


def found_in(files: Certificates, hosts: Sequence[str], *, at: datetime) -> list[str]:
    named = CertificateFiles(files.cert, files.key, files.ca)
    findings = certificate_findings(named, hosts, now_unix_s=at.timestamp())
    return [one.text for one in findings if not one.ok and "every user" not in one.text]


def test_lifetime_of_certificates(tmp_path: Path) -> None:
    """Three weeks before its end a certificate is a problem, and before its begin."""
    now = datetime.now(UTC)
    files = Certificates.issue(tmp_path, host="a.example")
    authority = trustme.CA()
    short = authority.issue_cert("a.example", not_after=now + timedelta(days=5))
    assert found_in(files, ["a.example"], at=now) == []
    Path(files.cert).write_bytes(b"".join(pem.bytes() for pem in short.cert_chain_pems))
    short.private_key_pem.write_to_path(files.key)
    authority.cert_pem.write_to_path(files.ca)
    (soon,) = found_in(files, ["a.example"], at=now)
    assert "in 4 days" in soon
    early = found_in(files, ["a.example"], at=datetime(1999, 1, 1, tzinfo=UTC))
    assert all("is valid only from" in one for one in early) and early


def test_certificate_of_another_authority_key_or_name(tmp_path: Path) -> None:
    """Each mismatch has a line of its own."""
    files = Certificates.issue(tmp_path / "own")
    other = Certificates.issue(tmp_path / "other", host="b.example")
    mixed = Certificates(ca=other.ca, cert=files.cert, key=other.key)
    found = found_in(mixed, ["b.example", "127.0.0.1"], at=datetime.now(UTC))
    assert found == [
        f"{files.cert} is for 127.0.0.1, and others reach this host as b.example",
        f"{files.cert} is signed by no certificate in {other.ca}",
        f"{other.key} is the key of another certificate",
    ]
    (unreadable,) = found_in(
        Certificates(ca=files.ca, cert=str(tmp_path / "none"), key=files.key),
        [],
        at=datetime.now(UTC),
    )
    assert unreadable.endswith("none: No such file or directory")
