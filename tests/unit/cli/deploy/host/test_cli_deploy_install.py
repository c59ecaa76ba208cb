"""`forge deploy install`: which files are installed, and what an interruption leaves."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge.cli.deploy.host import install
from forge.cli.deploy.host.file_errors import file_error
from forge.cli.deploy.host.file_history import FileHistory, write_file_history
from forge.cli.deploy.host.host import HostDirectory
from forge.cli.deploy.host.install import (
    NEW,
    adopt,
    chosen_source,
    lead_link,
    left_files,
    left_units,
)
from forge.cli.deploy.render.render import rendered_hosts
from forge.cli.deploy.render.rendered import MANIFEST, TREE, FileEntry, Manifest, manifest_text
from forge.core.errors import InvalidArgument
from tests.support.deploy.inventories import TWO_HOSTS, rendered

BEFORE, TO = "0.1.0", "0.2.0"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    out = tmp_path_factory.mktemp("rendered")
    rendered(TWO_HOSTS, out)
    return rendered_hosts(out)["alpha"]


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another /etc/forge."""
    for name in ("DEPLOYED", "NEW", "PREVIOUS"):
        monkeypatch.setattr(install, name, tmp_path / getattr(install, name).name)
    return tmp_path


def put(folder: Path, manifest: Manifest, release: str) -> Path:
    folder.mkdir()
    (folder / MANIFEST).write_bytes(manifest_text(replace(manifest, release=release)))
    return folder


def release_in(folder: Path) -> str:
    return HostDirectory(folder=folder).manifest().release


def test_copy_is_installed_once_it_is_complete(manifest: Manifest, etc: Path) -> None:
    """Its manifest is copied last."""
    deployed = put(etc / "deploy", manifest, BEFORE)
    (etc / NEW.name).mkdir()
    assert chosen_source("") == deployed
    (etc / NEW.name).rmdir()
    new = put(etc / NEW.name, manifest, TO)
    assert chosen_source("") == new


def test_adopted_copy_keeps_that_of_before_for_a_rollback(manifest: Manifest, etc: Path) -> None:
    """A repeated copy of the same files does not replace it."""
    put(etc / "deploy", manifest, BEFORE)
    adopt(put(etc / NEW.name, manifest, TO))
    adopt(put(etc / NEW.name, manifest, TO))
    assert release_in(etc / "deploy") == TO
    assert release_in(etc / "deploy.previous") == BEFORE
    assert not (etc / NEW.name).exists()


def test_interrupted_adoption_is_finished_by_a_repetition(manifest: Manifest, etc: Path) -> None:
    """The files of before had moved, the new ones had not."""
    put(etc / "deploy.previous", manifest, BEFORE)
    adopt(put(etc / NEW.name, manifest, TO))
    assert release_in(etc / "deploy") == TO
    assert release_in(etc / "deploy.previous") == BEFORE


def test_rollback_restores_the_files_of_before_once(manifest: Manifest, etc: Path) -> None:
    """A second one finds the release gone, and installs nothing else."""
    put(etc / "deploy", manifest, TO)
    put(etc / "deploy.previous", manifest, BEFORE)
    source = chosen_source(TO)
    assert release_in(source) == BEFORE
    adopt(source)
    assert chosen_source(TO) == etc / "deploy" and release_in(etc / "deploy") == BEFORE


def test_rollback_of_an_interrupted_swap_removes_what_it_added(
    manifest: Manifest, etc: Path
) -> None:
    """The copy was not adopted yet."""
    deployed = put(etc / "deploy", manifest, BEFORE)
    added = etc / "90-new.conf"
    added.write_text("[Service]\n")
    entry = FileEntry(path=str(added), sha256="x", mode=0o644)
    put(etc / NEW.name, replace(manifest, files=(*manifest.files, entry)), TO)
    assert chosen_source(TO) == deployed
    assert not added.exists() and not (etc / NEW.name).exists()


def test_units_with_data_stay_when_they_leave_the_inventory(manifest: Manifest) -> None:
    """Pools and etcd: their units run on with their files; a worker's go."""
    gone = ("forge-pool-replica@s0.service", "forge-inference@decode-2.service")
    kept = tuple(one for one in manifest.units if one.name not in gone)
    paths = {"/etc/forge/pool.toml", "/etc/forge/inference@decode-2.env"}
    files = tuple(one for one in manifest.files if one.path not in paths)
    now = replace(manifest, units=kept, files=files)
    assert left_units(manifest, now) == list(gone)
    assert left_files(manifest, now) == ["/etc/forge/inference@decode-2.env"]
    assert left_files(None, now) == [] and left_units(None, now) == []


def test_first_installation_has_nothing_to_return_to(manifest: Manifest, etc: Path) -> None:
    """A rollback without files of before installs the present ones."""
    put(etc / "deploy", manifest, TO)
    assert chosen_source(TO) == etc / "deploy"


def test_full_disk_is_named_by_its_file(
    manifest: Manifest, etc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as a missing right: root does not help. The file of before stays."""
    file = etc / "pool.toml"
    file.write_text("before\n")
    new = put(etc / NEW.name, manifest, TO)
    (new / TREE / str(file).lstrip("/")).parent.mkdir(parents=True)
    (new / TREE / str(file).lstrip("/")).write_text("after\n")
    entry = FileEntry(path=str(file), sha256="x", mode=0o644)
    one_file = replace(manifest, files=(entry,))
    (new / MANIFEST).write_bytes(manifest_text(one_file))
    state = SimpleNamespace(files={}, owner="root:root")
    monkeypatch.setattr(install, "read_host", lambda *_: state)
    monkeypatch.setattr(install, "_require", lambda *_: None)
    monkeypatch.setattr(install, "_note", lambda *_: None)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for write in (
        lambda: install.install(new),
        lambda: write_file_history(file, FileHistory()),
    ):
        with pytest.raises(InvalidArgument) as caught:
            write()
        assert str(caught.value) == f"{file}: No space left on device"
        assert file.read_text() == "before\n"
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
    assert str(file_error(denied)) == f"{file}: Permission denied; run it as root"


def test_units_that_leave_the_inventory_stop_unless_they_have_data(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are returned for the report."""
    gone = ("forge-pool-replica@s0.service", "forge-inference@decode-2.service")
    kept = tuple(one for one in manifest.units if one.name not in gone)
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(install, "systemctl", lambda *words: calls.append(words))
    stopped = install._stop_left(manifest, replace(manifest, units=kept))
    assert stopped == ([gone[1]], [gone[0]])
    assert calls == [("disable", "--quiet", "--now", gone[1])]


def test_link_leads_to_a_release_at_once(tmp_path: Path) -> None:
    """Whatever an interrupted change left beside it."""
    link = tmp_path / ".venv"
    (tmp_path / ".venv.new").symlink_to("0.0.1")
    for release in (BEFORE, TO, BEFORE):
        lead_link(link, release)
        assert link.readlink() == Path(release)
