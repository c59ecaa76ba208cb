"""What a newcomer gets wrong, and the one line that says what to do."""

from __future__ import annotations

import resource
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from forge.cli.command_exit import _Output
from forge.cli.local_run.display import RunDisplay
from forge.cli.main import app
from forge.runtime.process.child_processes import ProcessEvent

FILE = "{tmp}/file"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--set", "inference.x=1"), "there is no inference; name one of pool, scheduler"),
        (
            ("run", "--set", "scheduler.queue.mode=lifo", "--root", "{tmp}/new"),
            "scheduler cannot start: --set scheduler.queue.mode: queue.mode = 'lifo' is not "
            "allowed: ",
        ),
        (
            ("up", "--set", "trainer.foo=1", "--root", "{tmp}/new"),
            "trainer cannot start: --set trainer.foo: there is no setting foo = '1'; `python -m "
            "services.trainer --help` and the reference page Settings have them",
        ),
        (("run", "--root", FILE), "Not a directory; name another directory with --root"),
        (("up", "--run-dir", f"{FILE}/run"), "Not a directory; name another directory with --root"),
        (("key", "{tmp}/none/key"), "/none/key': No such file or directory"),
        (("model", "init", "smollm2"), "`forge model fetch smollm2` gets others"),
        (("status", "[/red]"), "[/red] is not a run directory"),
        (("status", "--root", "{tmp}"), "{tmp} has no run"),
        (("status", "--etcd", "127.0.0.1:1"), "--etcd needs --key-file"),
        (("queue", "status", "--root", "{tmp}"), "{tmp} has no run"),
        (
            ("queue", "drop", "--etcd", "127.0.0.1:1", "--key-file", FILE),
            "name tasks, or a domain by --domain; see forge queue drop --help",
        ),
        (
            ("pool", "check", "leader"),
            "leader is a copy to repair from, not a directory: forge pool check DIRECTORY --repair "
            "leader",
        ),
        (("deploy", "init", FILE), "{tmp}/file exists; name another file"),
        (
            ("deploy", "render", "--inventory", "{tmp}/none", "--out", "{tmp}/new"),
            "--inventory '{tmp}/none': No such file or directory\n",
        ),
        (("run", "--seed", "x"), "--seed 'x' must be a whole number; see forge run --help"),
        (("run", "--steps", "0"), "--steps '0' must be at least 1; see forge run --help"),
        (("run", "--sed", "1"), "no such option: --sed (possible options: --etcd, --seed, "),
        (("run", "--set"), "option '--set' requires an argument; see forge run --help"),
        (("nosuch",), "no such command 'nosuch'; see forge --help"),
        (("--foo",), "no such option: --foo; see forge --help"),
        (("queue", "submit"), "missing argument 'file'; see forge queue submit --help"),
        (("status", "a", "b"), "got unexpected extra argument(s) (b); see forge status --help"),
        (
            ("trajectories", "export", "x", "--format", "y"),
            "--format 'y' must be one of 'trajectories', 'sft', 'preference', 'tokens'; see forge ",
        ),
    ],
)
def test_command_line_mistake_is_one_line(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    """No traceback, and exit code 2: the same command would fail again."""
    (tmp_path / "file").touch()
    given = [word.format(tmp=tmp_path) for word in words]
    ended = CliRunner().invoke(app, given, prog_name="forge")
    assert ended.exit_code == 2, ended.exception
    assert ended.stderr.startswith("forge: ")
    assert ended.stderr.count("\n") == 1
    assert said.format(tmp=tmp_path) in ended.stderr
    assert not (tmp_path / "new" / "models").exists(), "weights take a minute"


def test_command_of_agents_other_than_run_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not read as a setting."""
    monkeypatch.setattr("sys.argv", ["forge agents", "rnu", "--etcd", "127.0.0.1:1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("forge.agents", run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "forge agents: no such command 'rnu'; use forge agents run\n"
    )


def test_help_wraps_paragraphs_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the line ends of the source, which leave ragged lines."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    shown = CliRunner().invoke(app, ["queue", "submit", "--help"]).stdout
    assert "After an interruption the same command continues after the tasks that the pool" in shown


@pytest.fixture
def light_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A torch that is imported at once: these tests are about other findings."""
    cuda = "class cuda:\n    device_count = staticmethod(lambda: 0)\n"
    (tmp_path / "torch.py").write_text(f"__version__ = '2.11'\n{cuda}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("light_torch")
def test_doctor_names_an_unusable_root(tmp_path: Path) -> None:
    """For example a file in its place."""
    (tmp_path / "file").touch()
    ended = CliRunner().invoke(app, ["doctor", "--root", str(tmp_path / "file" / "root")])
    assert ended.exit_code == 1
    assert f"BAD {tmp_path}/file is not a writable directory" in ended.stdout


@pytest.mark.parametrize(
    ("hard", "remedy"),
    [
        (resource.RLIM_INFINITY, "Raise it with `ulimit -n 4096`."),
        (20_000, "Raise it with `ulimit -n 4096`."),
        (64, "Only root raises the hard limit of 64: nofile in /etc/security/limits.conf, "),
    ],
)
@pytest.mark.usefixtures("light_torch")
def test_doctor_names_the_way_to_more_open_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hard: int, remedy: str
) -> None:
    """`ulimit` alone does not raise the hard limit."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, hard))
    ended = CliRunner().invoke(app, ["doctor", "--root", str(tmp_path)])
    assert ended.exit_code == 1
    assert f"BAD 64 open files allowed\n    {remedy}" in ended.stdout


@pytest.mark.parametrize(
    ("hard", "remedy"),
    [
        (resource.RLIM_INFINITY, "Raise it with `ulimit -f unlimited`."),
        (1 << 31, "Only root raises the hard limit of 2147483648: fsize in /etc/security"),
    ],
)
@pytest.mark.usefixtures("light_torch")
def test_doctor_names_a_limit_on_the_size_of_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hard: int, remedy: str
) -> None:
    """A trainer's checkpoint and a pool are larger, and most errors name no cause."""
    found = resource.getrlimit
    limits = {resource.RLIMIT_FSIZE: (1 << 30, hard)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind) or found(kind))
    ended = CliRunner().invoke(app, ["doctor", "--root", str(tmp_path)])
    assert ended.exit_code == 1
    assert f"BAD files are limited to 1 GiB\n    {remedy}" in ended.stdout


def test_doctor_names_unfit_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One too old, one missing, and a broken torch."""
    installed, found = metadata.version, metadata.distribution

    def version(name: str) -> str:
        return "2.5.1" if name == "torch" else installed(name)

    def distribution(name: str) -> metadata.Distribution:
        if name == "lmdb":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "distribution", distribution)
    (tmp_path / "torch.py").write_text("raise ImportError('libgomp.so.1: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = CliRunner().invoke(app, ["doctor", "--root", str(tmp_path)])
    assert ended.exit_code == 1
    assert "BAD packages: lmdb is missing, torch 2.5.1 is not >=2.11\n" in ended.stdout
    assert "BAD torch cannot be imported: ImportError: libgomp.so.1: cannot open" in ended.stdout


@pytest.mark.usefixtures("light_torch")
def test_doctor_names_another_distribution_with_the_same_import_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its files and Forge's would replace each other in one folder."""
    other = tmp_path / "nucleus_forge-1.2.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: nucleus-forge\nVersion: 1.2\n")
    (other / "top_level.txt").write_text("forge\n")
    monkeypatch.syspath_prepend(tmp_path)
    ended = CliRunner().invoke(app, ["doctor", "--root", str(tmp_path)])
    assert ended.exit_code == 1
    assert "BAD nucleus-forge 1.2 has a package forge too\n" in ended.stdout


def test_version_option_prints_the_version_of_pyproject() -> None:
    """`forge --version` prints what pyproject.toml says, the one place that has it."""
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    ended = CliRunner().invoke(app, ["--version"])
    assert ended.stdout == pyproject["project"]["version"] + "\n"


def test_last_output_of_a_process_is_shown_unchanged() -> None:
    """Brackets in them are not markup."""
    console = Console(file=StringIO(), width=200)
    crashed = ProcessEvent(kind="crashed", name="pool", pid=1, last_line="[/tmp/x] [red]")
    RunDisplay(console, total_steps=1).process_event(crashed)
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().endswith(": [/tmp/x] [red]\n")


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_full_disk_under_the_output_is_one_line(flag: str) -> None:
    """No traceback, and no second error as the process exits."""
    with Path("/dev/full").open("w") as full:
        ended = forge(flag, stdout=full)
    assert (ended.returncode, ended.stderr) == (
        1,
        "forge: the output: No space left on device\n",
    )


def test_lines_of_a_clean_up_on_a_full_disk_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line that has no space ends the command, the later ones do not end its clean-up."""
    with Path("/dev/full").open("w") as full:
        output = _Output(file=full)
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(OSError, match="No space left"):
            output.print("step 1")
        output.print("Stopping everything ...")


def test_closed_standard_streams_are_the_null_device() -> None:
    """As under a daemon that closes them."""
    closed = 'exec "$0" "$@" <&- >&-'
    ended = forge("--version", before=("sh", "-c", closed), stdout=subprocess.DEVNULL)
    assert (ended.returncode, ended.stderr) == (0, "")


def forge(*words: str, before: Sequence[str] = (), stdout: Any) -> subprocess.CompletedProcess[str]:
    """The command as a process."""
    command = [*before, sys.executable, "-m", "forge.cli", *words]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=240)
