"""Sandboxes in control groups of a real kernel: their limits hold for all processes together.

It needs a hierarchy of version 2 with the controllers memory and pids, in which root can make a
group. The runner starts in a group that is marked as systemd marks a delegated one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from forge.agents.sandbox.control_groups import delegated_group
from forge.core.errors import FailedPrecondition
from tests.support.agents.plain_user import PLAIN_USER, REPOSITORY, plain_user

TIMEOUT_S = 240.0
SYSTEM_PYTHON = "/usr/bin/python3"
SEARCHED = f"{REPOSITORY}:{Path(psutil.__file__).parents[1]}"
CHANGES = """[Service]
Type=oneshot
Restart=no
WatchdogSec=0
LoadCredential=
Environment=PYTHONPATH={path}
WorkingDirectory=/
ExecStart=
ExecStart={python} {directory}/runner.py {directory}/children.py
StandardOutput=append:{directory}/output
StandardError=append:{directory}/output
"""
"""The program in place of a runner's, and its output in a file."""
CHILDREN = """
import os, sys, time
made = []
def child():
    held = bytearray(b"x") * (60 << 20) if sys.argv[1] == "memory" else b""
    time.sleep(600 if sys.argv[1] == "processes" else 5)
try:
    while len(made) < int(sys.argv[2]):
        pid = os.fork()
        if not pid:
            try:
                child()
            finally:
                os._exit(0)
        made.append(pid)
except OSError:
    pass
if sys.argv[1] == "memory":
    for pid in made:
        os.waitpid(pid, 0)
print(len(made))
"""
RUNNER = """
import asyncio, json, os, sys
from pathlib import Path
from forge.agents.sandbox.control_groups import CONTROL_GROUPS, delegated_group
from forge.agents.launchers.base import ProgramLimits
from forge.agents.launchers.wrapped import SandboxLauncher
from forge.agents.sandbox.process_sandbox import ProcessSandbox
from forge.agents.scoring.reward_pool import RewardError, RewardLimits, RewardPool
from forge.agents.rewards import RewardTask
from forge.agents.environments.base import Transcript
from forge.agents.sandbox.program_sandbox import Sandbox
from forge.agents.scaffolds.command import Command
from tests.support.agents.scripted_gateway import ScriptedGateway, replay, text
from tests.support.agents.tasks import SumEpisode, rollout
from tests.support.runtime.waiting import until

group, children = delegated_group(), sys.argv[1]

async def command(kind, count):
    limits = ProgramLimits(memory_bytes=120 << 20, processes=30, tmp_bytes=8 << 20)
    words = [sys.executable, children, kind, count]
    launcher = SandboxLauncher(ProcessSandbox(tmp_bytes=8 << 20), limits=limits, words=words)
    await launcher.check()
    async with ScriptedGateway(replay(text("4"))) as gateway:
        try:
            attempt = Command(words, launcher=launcher).run(rollout(gateway), SumEpisode(4))
            return (await attempt).answer
        except RuntimeError as error:
            return str(error)

async def reward():
    limits = RewardLimits(call_s=60.0, memory_bytes=120 << 20, processes=30)
    functions = {"d": "tests.integration.test_control_groups:hungry"}
    pool = RewardPool(functions, limits=limits, workers=1, sandbox=ProcessSandbox(
        modules=["tests"], tmp_bytes=8 << 20))
    task = RewardTask(task_id="t", domain="d", payload={})
    try:
        return (await pool.score(Transcript(answer="4", turns=1), task))[0].value
    except RewardError as error:
        return str(error)
    finally:
        await pool.close()

async def main():
    CONTROL_GROUPS.adopt()
    found = {
        "own": Path("/proc/self/cgroup").read_text().strip(),
        "memory": await command("memory", "6"),
        "processes": await command("processes", "100"),
        "reward": await reward(),
        "program": (await Sandbox().run("print(4)")).output,
    }
    def left():
        # Each new group removes those whose last process has ended.
        with CONTROL_GROUPS.group(memory_bytes=0, processes=0):
            pass
        return [path.name for path in group.iterdir() if path.is_dir()]
    await until(lambda: left() == ["runner"])
    print(json.dumps(found))
asyncio.run(main())
"""


def hungry(trajectory: object, task: object) -> float:
    """A reward function whose processes use more memory together than one may."""
    children = [os.fork() for _ in range(4)]
    if 0 in children:
        held = bytearray(b"x") * (60 << 20)
        os._exit(len(held) & 1)
    for child in children:
        os.waitpid(child, 0)
    return 1.0


@pytest.fixture
def hierarchy() -> Path:
    """The root of control groups of version 2 that have the controllers."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    places = [line.split()[4] for line in mounts if " - cgroup2 " in line]
    if os.getuid() or not places:
        pytest.skip("no root, or no control groups of version 2")
    root = Path(places[0])
    missing = {"memory", "pids"} - {*(root / "cgroup.controllers").read_text().split()}
    if missing:
        # A kernel has each controller in one hierarchy; that of a container is the host's.
        pytest.skip(
            f"{root} has no controller {' and '.join(sorted(missing))}: this kernel has them in "
            "hierarchies of version 1 (/proc/cgroups)"
        )
    return root


@pytest.fixture(params=["root", "plain user"])
def group(request: pytest.FixtureRequest, hierarchy: Path) -> Iterator[Path]:
    """A delegated group; the runner is moved into it."""
    with suppress(OSError):
        (hierarchy / "cgroup.subtree_control").write_text("+memory +pids")
    made = hierarchy / f"forge-test-{os.getpid()}"
    made.mkdir()
    if request.param == "root":
        os.setxattr(made, "trusted.delegate", b"1")
    else:
        for path in (made, *made.iterdir()):
            os.chown(path, PLAIN_USER, PLAIN_USER)
    yield made
    (made / "cgroup.kill").write_text("1")
    for path in sorted(made.rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
    made.rmdir()


def test_limits_hold_for_all_processes_of_a_sandbox(group: Path, tmp_path: Path) -> None:
    """Memory and processes; a sandbox over its own limit has failed by itself, and its group ends
    with it."""
    children = tmp_path / "children.py"
    children.write_text(CHILDREN)
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)
    words: tuple[str, ...] = (sys.executable,)
    environment = {"PYTHONPATH": str(REPOSITORY)}
    if group.stat().st_uid:
        user = plain_user(tmp_path)
        if user.problem:
            pytest.skip(user.problem)
        words, environment = user.words, user.environment
    script = f'echo 0 > {group}/cgroup.procs && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *words, "-c", RUNNER, str(children)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["own"].endswith(f"{group.name}/runner")
    assert_limited(found)


def assert_limited(found: dict[str, str]) -> None:
    """What the runner found, with limits that hold."""
    assert "over its limit on memory" in found["memory"]
    assert 10 < int(found["processes"]) < 30
    assert "over its limit on memory" in found["reward"]
    assert found["program"] == "4\n"


UNIT = "forge-agents@test.service"


@pytest.fixture
def unit(hierarchy: Path) -> Iterator[Path]:
    """The unit of runners as it is shipped, with the program `runner.py` of the directory and its
    output; a systemd of this machine runs it."""
    if not Path("/run/systemd/system").is_dir():
        pytest.skip("this machine has not been booted by systemd")
    if REPOSITORY.parts[1] in ("home", "root"):
        pytest.skip("the unit hides home directories, and the repository is in one")
    directory, units = Path(f"/run/forge-test-{os.getpid()}"), Path("/run/systemd/system")
    directory.mkdir(mode=0o755)
    shipped = REPOSITORY / "deploy" / "systemd"
    drop_ins = units / f"{UNIT}.d"
    installed = [units / name for name in ("forge-agents@.service", "forge-.service.d")]
    installed.append(units / "forge-agents@.service.d")
    shutil.copy(shipped / installed[0].name, installed[0])
    for each in installed[1:]:
        shutil.copytree(shipped / each.name, each)
    drop_ins.mkdir()
    (drop_ins / "90-test.conf").write_text(CHANGES.format(
        directory=directory, python=SYSTEM_PYTHON, path=SEARCHED))  # fmt: skip
    sysusers = REPOSITORY / "deploy/sysusers.d/forge.conf"
    subprocess.run(["systemd-sysusers", str(sysusers)], check=True)
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    yield directory
    subprocess.run(["systemctl", "stop", UNIT], check=False)
    for path in (directory, drop_ins, *installed[1:]):
        shutil.rmtree(path)
    installed[0].unlink()
    subprocess.run(["systemctl", "daemon-reload"], check=True)


def test_shipped_unit_gives_each_sandbox_a_group(unit: Path) -> None:
    """With its user, its hardening and what systemd delegates to it."""
    imports = [SYSTEM_PYTHON, "-c", "import forge.agents, psutil"]
    if subprocess.run(imports, env={"PYTHONPATH": SEARCHED}, capture_output=True).returncode:
        pytest.skip(f"{SYSTEM_PYTHON}, which every user reads, is of another version")
    (unit / "runner.py").write_text(RUNNER)
    (unit / "children.py").write_text(CHILDREN)
    subprocess.run(["systemctl", "start", UNIT], check=False, timeout=TIMEOUT_S)
    output = (unit / "output").read_text()
    assert output and output.splitlines()[-1].startswith("{"), output[-3000:]
    found = json.loads(output.splitlines()[-1])
    assert found["own"].endswith(f"/{UNIT}/runner")
    assert_limited(found)


def test_group_that_is_not_delegated_is_not_used() -> None:
    """The group of this test run belongs to others."""
    with pytest.raises(FailedPrecondition, match=r"delegated|version 2"):
        delegated_group()
