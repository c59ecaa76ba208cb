"""`forge deploy check`: each planted difference is found, with its remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forge.cli.deploy.host import host
from forge.cli.deploy.host.comparison import (
    LINK,
    FoundFile,
    FoundUnit,
    HostState,
    Listener,
    differences,
    stale_since,
)
from forge.cli.deploy.host.file_history import (
    MOST_CHANGES,
    FileHistory,
    FileVersion,
    read_file_history,
    write_file_history,
)
from forge.cli.deploy.host.host import HostDirectory, first_difference
from forge.cli.deploy.render.render import rendered_hosts
from forge.cli.deploy.render.rendered import Manifest, UnitEntry
from forge.core.errors import InvalidArgument
from tests.support.deploy.inventories import RELEASE, TWO_HOSTS, rendered

POOL = "forge-pool@1.service"
SETTINGS = "/etc/forge/pool.toml"
BACKUP, BACKUP_RUN = "forge-pool-backup@pool-1.timer", "forge-pool-backup@pool-1.service"
TASKS = "/var/lib/forge/feed/math.jsonl"
Plant = Callable[[HostState], HostState]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    out = tmp_path_factory.mktemp("rendered")
    rendered(TWO_HOSTS, out)
    return rendered_hosts(out)["beta"]


def sound(manifest: Manifest) -> HostState:
    """The state of a host as it should be: everything was installed, then started."""
    return HostState(
        name=manifest.host,
        release=RELEASE,
        version=RELEASE,
        linked_unix_s=1.0,
        files={
            one.path: FoundFile(
                sha256=one.sha256, mode=one.mode, owner="root:root", changed_unix_s=1.0
            )
            for one in manifest.files
        },
        users=frozenset(manifest.users),
        units={BACKUP_RUN: FoundUnit(active="inactive", enabled=False)}
        | {
            one.name: FoundUnit(active="active", enabled=True, started_unix_s=2.0)
            for one in manifest.units
        },
        other_units=(),
        listeners={7211: Listener(process="python", pid=5, unit=POOL)},
        has_model=True,
        absent_data=(),
        starts_at_boot=True,
    )


def with_file(path: str, **changes: object) -> Plant:
    def plant(state: HostState) -> HostState:
        changed = replace(state.files[path], **changes)  # type: ignore[arg-type]
        return replace(state, files={**state.files, path: changed})

    return plant


def without_file(path: str) -> Plant:
    return lambda state: replace(
        state, files={one: found for one, found in state.files.items() if one != path}
    )


def with_unit(name: str, **changes: object) -> Plant:
    def plant(state: HostState) -> HostState:
        changed = replace(state.units[name], **changes)  # type: ignore[arg-type]
        return replace(state, units={**state.units, name: changed})

    return plant


def test_sound_host_has_no_difference(manifest: Manifest) -> None:
    """One line for each subject."""
    found = differences(manifest, sound(manifest))
    assert all(one.ok for one in found) and len(found) == 5


@pytest.mark.parametrize(
    ("plant", "text", "remedy"),
    [
        (lambda state: replace(state, name="gamma"), "this host is gamma", "set-hostname beta"),
        (
            lambda state: replace(state, users=state.users - {"forge-pool"}),
            "user forge-pool is missing",
            "systemd-sysusers",
        ),
        (lambda state: replace(state, has_model=False), "model directory", "Copy the starting"),
        (
            lambda state: replace(state, absent_data=(TASKS,)),
            f"{TASKS} is missing",
            f"chown root:forge-feed {TASKS}",
        ),
        (
            with_unit(BACKUP, active="inactive", started_unix_s=0.0),
            f"{BACKUP} is inactive",
            f"systemctl restart {BACKUP}",
        ),
        (
            with_unit(BACKUP_RUN, active="failed", result="exit-code"),
            f"the last run of {BACKUP_RUN} failed (exit-code)",
            f"systemctl start {BACKUP_RUN}",
        ),
        (
            lambda state: replace(state, other_units=("forge-gateway@7.service",)),
            "forge-gateway@7.service is not in the inventory",
            "systemctl disable --now forge-gateway@7.service",
        ),
        (lambda state: replace(state, release=""), "leads to no installation", "install"),
        (
            lambda state: replace(state, release="0.0.9"),
            "leads to 0.0.9, not to 0.1.0",
            "forge deploy upgrade",
        ),
        (lambda state: replace(state, version=""), "/opt/forge/0.1.0 has no forge", "pip install"),
        (lambda state: replace(state, version="0.0.9"), "has forge 0.0.9", "Install 0.1.0"),
        (
            without_file("/etc/systemd/system/forge-pool@.service"),
            "unit /etc/systemd/system/forge-pool@.service is missing",
            "forge deploy install",
        ),
        (
            with_file("/etc/forge/pool.toml", sha256="x", difference="line 3 is 'a', not 'b'"),
            "file /etc/forge/pool.toml differs: line 3 is 'a', not 'b'",
            "put it into the inventory",
        ),
        (
            with_file("/etc/forge/key", owner="forge-pool:root"),
            "/etc/forge/key belongs to forge-pool:root, not to root:root",
            "chown root:root /etc/forge/key",
        ),
        (
            with_file("/etc/forge/key", mode=0o644),
            "/etc/forge/key has mode 0644, not 0600",
            "chmod 0600 /etc/forge/key",
        ),
        (with_unit(POOL, enabled=False), f"{POOL} is not enabled", f"systemctl enable {POOL}"),
        (
            with_unit(POOL, active="failed", result="exit-code", started_unix_s=0.0),
            f"{POOL} is failed (exit-code)",
            f"journalctl -u {POOL}",
        ),
        (
            with_file("/etc/forge/pool.toml", changed_unix_s=3.0),
            f"{POOL} runs since before the change of /etc/forge/pool.toml",
            f"systemctl restart {POOL}",
        ),
        (
            lambda state: replace(state, other_units=("forge-pool@7.service",)),
            "forge-pool@7.service is not in the inventory",
            "forge pool retire",
        ),
        (
            lambda state: replace(state, starts_at_boot=False),
            "forge.target is not enabled",
            "systemctl enable forge.target",
        ),
        (
            lambda state: replace(
                state, listeners={7221: Listener(process="nginx", pid=7, unit="nginx.service")}
            ),
            "port 7221 (grpc of forge-scheduler@1.service) is taken by nginx, process 7 of nginx",
            "set another port",
        ),
    ],
)
def test_planted_difference_is_found(
    manifest: Manifest, plant: Plant, text: str, remedy: str
) -> None:
    """One line for it, with what to do."""
    problems = [one for one in differences(manifest, plant(sound(manifest))) if not one.ok]
    assert any(text in one.text and remedy in one.remedy for one in problems), problems
    shared = "pool.toml" in text and "runs since" in text
    assert len(problems) == (2 if shared else 1)


def test_unit_is_stale_for_its_own_inputs_alone(manifest: Manifest) -> None:
    """Another service's settings, and a link that changed before its start, concern it not."""
    state = sound(manifest)
    units = {one.name: one for one in manifest.units}
    other = with_file("/etc/forge/trainer.toml", changed_unix_s=3.0)(state)
    assert stale_since(units[POOL], other) == ""
    assert stale_since(units["forge-trainer@1.service"], other) == "/etc/forge/trainer.toml"
    swapped = replace(state, linked_unix_s=3.0)
    stale = {one.name for one in manifest.units if stale_since(one, swapped) == LINK}
    # A timer starts its service with the release of that moment.
    assert stale == {one.name for one in manifest.units} - {BACKUP}


def changed(state: HostState, path: str, digest: str, unix_s: float) -> HostState:
    """The state after an installation that wrote a file, or with an empty digest removed it."""
    before = noted(state, unix_s)
    if path == LINK:
        after = replace(before, release=digest, linked_unix_s=unix_s)
    elif digest:
        after = with_file(path, sha256=digest, changed_unix_s=unix_s)(before)
    else:
        after = without_file(path)(before)
    return noted(after, unix_s)


def noted(state: HostState, unix_s: float) -> HostState:
    units = [UnitEntry(name=POOL, kind="pool", inputs=(SETTINGS,), instance_id="pool-beta-1")]
    changes = state.changes.noted(units, state.contents(), now_unix_s=unix_s)
    return replace(state, changes=changes)


@pytest.mark.parametrize(
    ("unit", "exit_code", "ended"),
    [
        ("forge-feed@math.service", 0, True),
        ("forge-feed@math.service", 130, False),
        ("forge-agents@1.service", 0, False),
    ],
)
def test_feed_that_ended_by_itself_is_no_difference(
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    unit: str,
    exit_code: int,
    ended: bool,
) -> None:
    """A stopped one ends with 130. Of another service 0 is a stop."""
    shown = (
        f"Id={unit}\nActiveState=inactive\nResult=success\nExecMainStartTimestampMonotonic=7\n"
        f"ActiveEnterTimestampMonotonic=9\nExecMainCode=1\nExecMainStatus={exit_code}\n"
    )
    monkeypatch.setattr(host, "systemctl", lambda *words: shown)
    found = host.read_units([unit])[unit]
    state = sound(manifest)
    enabled = replace(found, enabled=True)
    problems = differences(manifest, replace(state, units={**state.units, unit: enabled}))
    assert [one.text for one in problems if not one.ok] == [f"{unit} is inactive"] * (not ended)


@pytest.mark.parametrize("path", [SETTINGS, LINK])
def test_rollback_makes_no_unit_stale_that_ran_through_it(manifest: Manifest, path: str) -> None:
    """A file has the content of the unit's start again. A unit that restarted in between read the
    other one; a change by hand is none of the installation's."""
    (unit,) = (one for one in manifest.units if one.name == POOL)
    first = sound(manifest)
    before = {one: found.digest for one, found in first.contents().items()}[path]
    other = changed(first, path, "0.9.0", 5.0)
    assert stale_since(unit, other) == path
    back = changed(other, path, before, 7.0)
    assert stale_since(unit, back) == ""
    assert stale_since(unit, with_unit(POOL, started_unix_s=6.0)(back)) == path
    assert stale_since(unit, with_unit(POOL, started_unix_s=8.0)(back)) == ""
    if path == SETTINGS:
        touched = with_file(path, changed_unix_s=9.0)(back)
        assert stale_since(unit, touched) == path


def test_removed_file_makes_its_unit_stale_until_a_restart(manifest: Manifest) -> None:
    """The manifest no longer names it: variables of an instance that left the inventory."""
    (unit,) = (one for one in manifest.units if one.name == POOL)
    removed = changed(sound(manifest), SETTINGS, "", 5.0)
    unit = replace(unit, inputs=tuple(one for one in unit.inputs if one != SETTINGS))
    assert stale_since(unit, removed) == SETTINGS
    assert stale_since(unit, with_unit(POOL, started_unix_s=6.0)(removed)) == ""


def test_noted_changes_are_bounded_and_survive_their_file(tmp_path: Path) -> None:
    """A damaged or absent file is no history: times of files decide then."""
    file, unit = tmp_path / "changes", UnitEntry(name=POOL, kind="pool", inputs=("/a",))
    changes = FileHistory()
    for number in range(MOST_CHANGES + 3):
        present = {"/a": FileVersion(unix_s=float(number), digest=str(number))}
        changes = changes.noted([unit], present, now_unix_s=0.0)
    assert len(changes.files["/a"]) == MOST_CHANGES
    write_file_history(file, changes)
    assert read_file_history(file) == changes
    assert changes.differs("/a", changes.files["/a"][-1], since_unix_s=1.0)
    file.write_text("{")
    assert read_file_history(file) == read_file_history(tmp_path / "absent") == FileHistory()


@pytest.mark.parametrize(
    ("found", "expected", "text"),
    [
        (b"a\nb\n", b"a\nb\n", ""),
        (b"a\nx\n", b"a\nb\n", "line 2 is 'x', not 'b'"),
        (b"a\n", b"a\nb\n", "line 2 is '', not 'b'"),
        (b"a\nb\nc\n", b"a\nb\n", "line 3 is 'c', not ''"),
    ],
)
def test_first_difference_names_a_line(found: bytes, expected: bytes, text: str) -> None:
    """The line of this host, then that of the rendered file."""
    assert first_difference(found, expected) == text


def test_host_without_a_manifest_says_what_brings_it(tmp_path: Path) -> None:
    """Nothing was ever applied."""
    with pytest.raises(InvalidArgument, match="forge deploy apply copies it"):
        HostDirectory(folder=tmp_path).manifest()
