"""Containers of commands: their image, their end, and one line for what is missing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.agents.launchers.base import ProgramLimits
from forge.agents.launchers.container import ContainerLauncher, ContainerSettings
from forge.agents.scaffolds.command import Command
from forge.core.errors import ConfigError, InvalidArgument
from tests.support.agents.container_engine import ENGINES, IMAGE, READ, engine
from tests.support.agents.scripted_gateway import ScriptedGateway, replay, text
from tests.support.agents.tasks import SumEpisode, rollout
from tests.support.runtime.waiting import until

LIMITS = ProgramLimits(memory_bytes=64 << 20, processes=64, tmp_bytes=8 << 20)
RUNNER = """
import asyncio, sys
from tests.integration.test_command_containers import answer_of, launcher
async def main():
    containers = launcher(sys.argv[1:], runner="killed")
    await containers.check()
    await answer_of(containers, "sleep", "600")
asyncio.run(main())
"""


def launcher(
    words: list[str] | tuple[str, ...], *, image: str = IMAGE, runner: str = "test"
) -> ContainerLauncher:
    settings = ContainerSettings(engine=" ".join(words), image=image, read=READ)
    return ContainerLauncher(settings, limits=LIMITS, runner=runner)


async def answer_of(containers: ContainerLauncher, *words: str, **payload: Any) -> str:
    async with ScriptedGateway(replay(text("4"))) as gateway:
        attempt = rollout(gateway, **payload)
        return (await Command(words, launcher=containers).run(attempt, SumEpisode(4))).answer


@pytest.fixture(params=ENGINES)
def words(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """An engine that runs here."""
    found, problem = engine(request.param)
    if problem:
        pytest.skip(problem)
    return found


def left(words: tuple[str, ...], runner: str) -> list[str]:
    """Containers of a runner."""
    argv = [*words, "ps", "--all", "--quiet", "--filter", f"label=forge.runner={runner}"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()


async def test_task_chooses_the_image(words: tuple[str, ...]) -> None:
    """`image` of the payload; a missing one is the reason of the attempt, and none an error of the
    task."""
    containers = launcher(words, image="")
    await containers.check()
    try:
        assert await answer_of(containers, "echo", "4", image=IMAGE) == "4"
        with pytest.raises(RuntimeError, match=r"no container of image localhost/absent: .*absent"):
            await answer_of(containers, "echo", "4", image="localhost/absent")
        for wrong in ("", 4, "--privileged"):
            with pytest.raises(InvalidArgument, match="must name an image"):
                await answer_of(containers, "echo", "4", image=wrong)
        with pytest.raises(RuntimeError, match=r"ended with 127: .*no-such-program"):
            await answer_of(containers, "no-such-program", image=IMAGE)
    finally:
        await containers.close()
    assert not left(words, "test")


async def test_container_over_its_limit_has_failed_by_itself(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is its own limit, no fault of the host. The engine leaves no file behind."""
    monkeypatch.chdir(tmp_path)
    containers = launcher(words)
    await containers.check()
    try:
        program = "x = bytearray(b'x') * (300 << 20)"
        with pytest.raises(RuntimeError, match="SIGKILL, over its limit on memory"):
            await answer_of(containers, str(Path(sys.base_prefix, "bin/python3")), "-c", program)
    finally:
        await containers.close()
    assert not list(tmp_path.iterdir())


async def test_no_container_outlives_a_killed_runner(words: tuple[str, ...]) -> None:
    """Neither one whose rollout is cancelled, nor any after SIGKILL of the runner."""
    containers = launcher(words)
    await containers.check()
    attempt = asyncio.create_task(answer_of(containers, "sleep", "600"))
    await until(lambda: left(words, "test"))
    attempt.cancel()
    await asyncio.wait([attempt])
    assert not left(words, "test")
    await containers.close()
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, *words])
    await until(lambda: left(words, "killed"))
    runner.kill()
    runner.wait()
    await until(lambda: not left(words, "killed"))


async def test_missing_engine_or_image_is_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    """Before the first lease, with the setting."""
    with pytest.raises(ConfigError, match="container_engine: there is no program 'no-engine'"):
        launcher(["no-engine"])
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'cannot connect to the daemon' >&2\nexit 125\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match=r"^container_engine: .*cannot connect to the daemon$"):
        await launcher([str(broken)]).check()
    with pytest.raises(ConfigError, match=r"^container_image: .*absent"):
        await launcher(words, image="localhost/absent").check()
