"""Forge on a bare Debian 12 host, by the documented commands: `make test-systemd`.

The commands are those of deploy/README.md, run as they stand there, except that the tiny model
takes the place of a downloaded one, and CPU that of a GPU. They run on a host without a compiler,
with its own systemd, which is then rebooted, and its services stopped, killed and started twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.systemd.bare_host import BareHost, missing
from tests.support.systemd.installed import Installed
from tests.support.systemd.work import READ, SESSIONS, TASKS, until

FORGE = "/opt/forge/.venv/bin/forge"
CLUSTER = ("--etcd", "127.0.0.1:2379", "--key-file", "/etc/forge/key")
USERS = ("pool", "scheduler", "gateway", "inference", "trainer", "agents")
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "possible here")


@pytest.fixture(scope="module")
def host(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareHost]:
    """The host with everything started and not yet rebooted."""
    disk = installed.copy(tmp_path_factory.mktemp("host") / "debian12")
    (disk.root / "root/tasks.py").write_text(TASKS)
    (disk.root / "root/sessions.py").write_text(SESSIONS)
    host = BareHost(disk, shared=installed.software)
    host.boot()
    try:
        host.run("bash", "-c", installed.start)
        yield host
    finally:
        host.stop()
        disk.remove()


def enabled(host: BareHost) -> list[str]:
    units = host.run("ls", "/etc/systemd/system/forge.target.wants").split()
    assert len(units) == 10
    return units


def all_active(host: BareHost) -> bool:
    return all(host.show(unit, "ActiveState") == "active" for unit in enabled(host))


def trained(host: BareHost) -> int:
    """Groups trained, as the scheduler reports them."""
    shown = re.search(r"^trained: (\d+)", host.run(FORGE, "status", *CLUSTER, check=False), re.M)
    return int(shown[1]) if shown else 0


def submit(host: BareHost, first: int, beyond: int) -> None:
    """Submit the tasks of these seeds."""
    file = f"/root/tasks-{first}.jsonl"
    write = f"/opt/forge/.venv/bin/python /root/tasks.py {first} {beyond} > {file}"
    host.run("bash", "-c", write)
    host.run(FORGE, "queue", "submit", file, *CLUSTER)


def test_documented_commands_start_every_unit(host: BareHost) -> None:
    """Each runs as the user of its service, and tasks are trained."""
    until(lambda: all_active(host))
    for unit in enabled(host):
        user = unit.partition("@")[0].removesuffix(".service")
        owner = host.run("stat", "--format=%U", f"/proc/{host.show(unit, 'MainPID')}").strip()
        assert owner == user
    submit(host, 0, 16)
    until(lambda: trained(host) == 16)


def test_no_service_reads_the_key_or_the_data_of_another(host: BareHost) -> None:
    """systemd gives each the key as a credential; agents may read neither pool nor checkpoints."""
    secrets = ("/etc/forge/key", "/etc/forge/agents-token")
    paths = (*secrets, "/var/lib/forge/pool-1/", "/var/lib/forge/trainer-1/")
    for user in USERS:
        others = [path for path in paths if f"/{user}-1" not in path]
        for path in others:
            words = ("runuser", "-u", f"forge-{user}", "--", "ls" if path.endswith("/") else "cat")
            assert "Permission denied" in host.run(*words, path, check=False), (user, path)


def test_journal_lines_have_the_priority_of_their_level(host: BareHost) -> None:
    """A line's priority is its level."""
    assert '"level": "info"' in host.journal("--unit=forge-*", "--priority=info")
    assert '"level": "info"' not in host.journal("--unit=forge-*", "--priority=warning")


def test_reboot_starts_every_unit_again(host: BareHost) -> None:
    """No trained step is lost, and new tasks are trained."""
    host.reboot()
    until(lambda: all_active(host))
    until(lambda: trained(host) == 16)
    submit(host, 16, 32)
    until(lambda: trained(host) == 32)


def test_hung_process_is_restarted_by_the_watchdog(host: BareHost) -> None:
    """SIGSTOP: no beat reaches the watchdog."""
    drop_in = "mkdir -p /run/systemd/system/forge-pool@1.service.d; printf '[Service]\\n%s\\n' "
    drop_in += "WatchdogSec=20 > /run/systemd/system/forge-pool@1.service.d/20-watchdog.conf"
    host.run("bash", "-c", drop_in)
    host.run("systemctl", "daemon-reload")
    host.run("systemctl", "restart", "forge-pool@1")
    pid = host.show("forge-pool@1", "MainPID")
    host.run("systemctl", "kill", "--signal=STOP", "--kill-whom=main", "forge-pool@1")
    until(lambda: host.show("forge-pool@1", "MainPID") not in (pid, "0"))
    until(lambda: all_active(host))
    assert "watchdog timeout" in host.run("journalctl", "-b", "--unit=forge-pool@1").lower()


def test_killed_services_restart_and_continue_training(host: BareHost) -> None:
    """kill -9 of every unit at once, etcd included."""
    host.run("systemctl", "kill", "--signal=KILL", *enabled(host))
    until(lambda: all_active(host))
    until(lambda: trained(host) == 32)
    submit(host, 32, 48)
    until(lambda: trained(host) == 48)


def test_gateway_on_an_occupied_port_is_not_restarted(host: BareHost) -> None:
    """It is an error of the settings: the unit fails once, and the line names the port."""
    host.run("systemctl", "start", "forge-gateway@2", check=False)
    until(lambda: host.show("forge-gateway@2", "ActiveState") == "failed")
    assert host.show("forge-gateway@2", "NRestarts") == "0"
    assert host.show("forge-gateway@2", "ExecMainStatus") == "2"
    assert "8000" in host.journal("--unit=forge-gateway@2")


def test_gateways_of_a_host_share_a_port(host: BareHost) -> None:
    """By the documented settings: each session reaches one process, whichever the kernel chose."""
    settings = "/etc/forge/gateway.toml"
    host.run("sed", "-i.bak", r"s/^port = 8000/port = 0\nshared_port = 8000/", settings)
    host.run("systemctl", "restart", "forge-gateway@1", "forge-gateway@2")
    until(lambda: all(host.show(f"forge-gateway@{n}", "ActiveState") == "active" for n in (1, 2)))
    sessions = ("/opt/forge/.venv/bin/python", "/root/sessions.py", "8000", "9231", "9232")
    until(lambda: "handed over by both" in host.run(*sessions))
    host.run("systemctl", "stop", "forge-gateway@2")
    host.run("mv", f"{settings}.bak", settings)
    host.run("systemctl", "restart", "forge-gateway@1")
    until(lambda: all_active(host))


def test_console_is_read_with_a_token_alone(host: BareHost) -> None:
    """By the user of its service, which every user of the host reaches."""
    host.run("systemctl", "start", "forge-console@1")
    until(lambda: host.show("forge-console@1", "ActiveState") == "active")
    owner = host.run("stat", "--format=%U", f"/proc/{host.show('forge-console@1', 'MainPID')}")
    assert owner.strip() == "forge-console"
    token = host.run(FORGE, "token", "issue", "viewer", "--subject", "reader", *CLUSTER).strip()
    read = ("/usr/bin/python3", "-c", READ, "http://127.0.0.1:7800/api/queue/0")
    assert host.run(*read).strip() == "401"
    until(lambda: host.run(*read, token).strip() == "200")
    host.run("systemctl", "stop", "forge-console@1")


def test_moved_trainer_does_not_start_over(host: BareHost) -> None:
    """A standby fetches the checkpoints of the first trainer and continues from them; one that is
    elected without any refuses, once."""
    before = trained(host)
    # Its stop saves a checkpoint.
    host.run("systemctl", "restart", "forge-trainer@1")
    host.run("systemctl", "start", "forge-trainer@2")
    until(lambda: '"event": "checkpoint_fetched"' in host.journal("--unit=forge-trainer@2"))
    host.run("systemctl", "stop", "forge-trainer@1")
    until(lambda: '"event": "rewound"' in host.journal("--unit=forge-trainer@2"))
    submit(host, 48, 56)
    until(lambda: trained(host) == before + 8)
    host.run("systemctl", "stop", "forge-trainer@2")
    host.run("systemctl", "start", "forge-trainer@3", check=False)
    until(lambda: host.show("forge-trainer@3", "ActiveState") == "failed")
    said = host.journal("--unit=forge-trainer@3")
    assert "/var/lib/forge/trainer-2" in said and "--start-over=" in said
    assert '"weights_published"' not in said
    host.run("systemctl", "start", "forge-trainer@2")
    submit(host, 56, 64)
    until(lambda: trained(host) == before + 16)
