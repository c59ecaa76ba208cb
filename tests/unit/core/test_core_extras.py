"""Optional packages: a missing one is one line that names its extra."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forge.cli.local_run import plot
from forge.cli.main import app
from forge.core.entry_points import load_entry_point
from forge.core.errors import ConfigError
from forge.core.extras import extras_named, extras_with, place_of
from forge.runtime.process import startup
from forge.runtime.process.service import _Process
from forge.runtime.settings import ServiceConfig

TORCH = "not installed: torch; install it: pip install 'forge-rl[{}]'"


def uninstall(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Hides an installed package from its metadata."""
    installed = metadata.distribution

    def distribution(name: str) -> metadata.Distribution:
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "distribution", distribution)


@pytest.mark.parametrize(
    ("module", "extras"),
    [
        ("torch", ["inference", "trainer"]),
        ("lmdb", ["pool"]),
        ("reasoning_gym", ["gym"]),
        ("tensorboardX", ["tensorboard"]),
        ("openai.types", ["agents"]),
        ("grpc", []),
        ("msgspec", []),
        ("my_rewards", []),
    ],
)
def test_extras_of_a_module_come_from_the_metadata(module: str, extras: list[str]) -> None:
    """In the order of pyproject.toml; a package of the core and an unknown module have none."""
    assert extras_with(module) == extras


def test_missing_package_of_several_extras_names_the_preferred_one() -> None:
    """Without a preferred extra the first; an unknown module keeps its error."""
    for preferred, named in (("trainer", "trainer"), ("gateway", "inference"), ("", "inference")):
        with pytest.raises(ConfigError) as raised, extras_named(preferred):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        assert str(raised.value) == TORCH.format(named)
    with pytest.raises(ModuleNotFoundError, match="my_rewards"), extras_named():
        raise ModuleNotFoundError("No module named 'my_rewards'", name="my_rewards")


def test_command_without_its_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One line and exit code 2."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(plot, "read_steps", lambda path: [])
    monkeypatch.setattr(plot, "read_evaluations", lambda path: [])
    ended = CliRunner().invoke(app, ["plot", str(tmp_path)])
    assert ended.exit_code == 2
    assert ended.stderr == (
        "forge: not installed: matplotlib; install it: pip install 'forge-rl[plot]'\n"
    )


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("model init --root {tmp}", "torch", "trainer"),
        ("model warm-start --help", "torch", "trainer"),
        ("pool check {tmp}", "lmdb", "pool"),
    ],
)
def test_command_starts_no_program_without_its_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, package: str, extra: str
) -> None:
    """The program would fail with a traceback."""
    uninstall(monkeypatch, package)
    ended = CliRunner().invoke(app, command.format(tmp=tmp_path).split())
    assert ended.exit_code == 2
    assert ended.stderr == (
        f"forge: not installed: {package}; install it: pip install 'forge-rl[{extra}]'\n"
    )
    assert list(tmp_path.iterdir()) == []


def lacks(module: str) -> Callable[[], type[Any]]:
    def load_app() -> type[Any]:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    return load_app


def test_service_without_its_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, with the exit code of wrong settings."""
    monkeypatch.setattr(sys, "argv", ["trainer"])
    with pytest.raises(SystemExit) as ended:
        startup.run("trainer", ServiceConfig, lacks("torch"))
    assert ended.value.code == startup.CANNOT_START
    assert capsys.readouterr().err == f"forge trainer: {TORCH.format('trainer')}\n"


async def test_service_that_lacks_a_package_at_start_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The role of an inference process is imported there. No traceback is logged."""

    async def start(self: object, undo: object) -> None:
        lacks("torch")()

    monkeypatch.setattr(_Process, "_start", start)
    with pytest.raises(ConfigError) as raised:
        await _Process("inference", ServiceConfig(), object).live()
    assert str(raised.value) == TORCH.format("inference")


def test_entry_point_without_its_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also an engine of this distribution."""
    (tmp_path / "engine_without_torch.py").write_text("import lmdb\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "lmdb", None)
    entry = metadata.EntryPoint("e", "engine_without_torch", "forge.engines")
    with pytest.raises(ConfigError, match=r"lmdb; install it: pip install 'forge-rl\[pool\]'"):
        load_entry_point(entry)


@pytest.mark.parametrize(
    "call",
    [lambda: int("x"), lambda: json.loads("x"), lambda: asyncio.run(asyncio.wait_for(fails(), 60))],
    ids=["own", "library", "below the library"],
)
def test_place_of_an_error_is_in_code_outside_of_pythons_library(call: Callable[[], Any]) -> None:
    """The line of json/decoder.py would say nothing about an agent or a score."""
    with pytest.raises(ValueError) as raised:
        call()
    assert place_of(raised.value).startswith(" (test_core_extras.py:")


async def fails() -> None:
    json.loads("x")
