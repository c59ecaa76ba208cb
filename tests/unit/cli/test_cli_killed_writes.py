"""Kill -9 of a command at any write: files are whole or absent, and the command can be repeated.

A command is killed before each call of a function that changes files; one process forks them all,
because the imports take most of the time.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from forge.cli.credentials.certs_authority import CA_KEY, HOST_KEY
from forge.cli.deploy.render.render import rendered_hosts
from forge.cli.deploy.render.rendered import TREE
from forge.cli.exports.files import export_file
from forge.cli.exports.trajectory_rows import TrajectoryRows
from forge.cli.local_run.models.kept import PUBLISHED_FILE, read_kept
from forge.cli.local_run.models.model_export import export_model
from forge.v1 import common_pb2
from tests.support.deploy.inventories import TWO_HOSTS, rendered

SWEEP = """
import os, signal, sys
from pathlib import Path
from tests.unit.cli import test_cli_killed_writes as commands

NAMES = "open write close replace rename mkdir rmdir unlink chmod fsync"

def kill_at(call):
    def count(frame, event, function):
        nonlocal call
        if event == "c_call" and function.__name__ in NAMES.split():
            call -= 1
            if not call:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(count)

command, folder, step = commands.COMMANDS[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3])
command(folder / "warm")
call = 1
while True:
    child = os.fork()
    if not child:
        kill_at(call)
        command(folder / str(call))
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
    call += step
"""


def export(folder: Path) -> None:
    with export_file(folder / "rows.jsonl", TrajectoryRows()) as writer:
        for number in range(3):
            writer.add(common_pb2.Trajectory(trajectory_id=f"t:{number}:0"))


def model(folder: Path) -> None:
    export_model(folder.parent / "checkpoint", folder / "model")


def deployment(folder: Path) -> None:
    rendered(TWO_HOSTS, folder)


COMMANDS: Mapping[str, Callable[[Path], None]] = {
    "export": export,
    "model": model,
    "deployment": deployment,
}


def killed(command: str, folder: Path, *, step: int = 1) -> Iterator[Path]:
    """Yields the directory of each killed command, with at least some calls of it."""
    argv = [sys.executable, "-c", SWEEP, command, str(folder), str(step)]
    subprocess.run(argv, check=True, timeout=240)
    found = sorted(each for each in folder.iterdir() if each.name.isdecimal())
    assert len(found) > 5
    yield from found


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_killed_export_of_rows_leaves_a_whole_file_or_none(tmp_path: Path) -> None:
    """A repeated export also replaces what the killed one left."""
    outcomes = set()
    for folder in killed("export", tmp_path):
        file = folder / "rows.jsonl"
        outcomes.add(file.exists())
        if not file.exists():
            export(folder)
        assert file.read_text().count("\n") == 3
        assert list(folder.iterdir()) == [file]
    assert outcomes == {True, False}


def test_killed_export_of_a_model_leaves_a_whole_directory_or_none(tmp_path: Path) -> None:
    """A repeated export succeeds, and removes what the killed one left."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    whole = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    about = f'{{"tensor_names": [], "digest": "{whole}", "dtype": "bfloat16"}}'
    (checkpoint / PUBLISHED_FILE).write_text(about)
    (checkpoint / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (checkpoint / "tokenizer.json").write_text("{}")
    for folder in killed("model", tmp_path):
        out = folder / "model"
        if not out.exists():
            model(folder)
        assert read_kept(out).digest == whole
        assert {file.name for file in out.iterdir()} == {file.name for file in checkpoint.iterdir()}
        assert list(folder.iterdir()) == [out]


def test_killed_render_leaves_whole_files(tmp_path: Path) -> None:
    """The next render completes the tree with the same secrets, and removes what is left of it."""
    for folder in killed("deployment", tmp_path, step=41):
        before = files(folder)
        deployment(folder)
        after = files(folder)
        # A key without its certificate is made again.
        pairs = (CA_KEY, HOST_KEY)
        for path in before:
            if path.suffix != ".new" and path.name[0] != "." and path.name not in pairs:
                assert before[path] == after[path], path
        for host, manifest in rendered_hosts(folder).items():
            root = folder / "hosts" / host / TREE
            assert {f"/{path.relative_to(root)}" for path in files(root)} == {
                entry.path for entry in manifest.files
            }
        assert [path for path in files(folder / "hosts") if path.name[0] == "."] == []
