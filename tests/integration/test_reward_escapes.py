"""Hostile reward functions reach nothing of their host, with a runner of root or a plain user.

Each attack is an expression that a reward function of the sandbox evaluates.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from forge.agents.environments.base import Transcript
from forge.agents.rewards import RewardTask
from forge.agents.sandbox import bubblewrap
from forge.agents.sandbox.process_sandbox import ProcessSandbox
from forge.agents.scoring.reward_pool import RewardError, RewardLimits, RewardPool
from forge.core.errors import ConfigError
from tests.support.agents.plain_user import PLAIN_USER, plain_user
from tests.support.runtime.waiting import until

pytestmark = pytest.mark.faults

SECRET = "a-secret-of-the-runner"
MODULE = """
import os, socket, subprocess, sys, ctypes
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)

def reached(attempt, *arguments):
    "1.0 if the attempt succeeds"
    try:
        return float(attempt(*arguments) != -1)
    except OSError:
        return 0.0

def filled(directory):
    "MiB written before the disk is full"
    with open(directory + "/bomb", "wb", buffering=0) as file:
        try:
            for number in range(64):
                file.write(bytes(1 << 20))
        except OSError:
            return float(number)
        finally:
            os.unlink(directory + "/bomb")
    return 64.0

def forks():
    "children that exist at once, at most 60"
    children = []
    try:
        while len(children) < 60:
            child = os.fork()
            if not child:
                import signal; signal.pause()
            children.append(child)
    except OSError:
        pass
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
    return float(len(children))

def grade(trajectory, task):
    return eval(task.payload["expression"], globals())

def crash(trajectory, task):
    os.kill(os.getpid(), 11)
"""


def limits(processes: int = 0) -> RewardLimits:
    return RewardLimits(call_s=60.0, memory_bytes=1 << 30, processes=processes)


@pytest.fixture(scope="module")
def modules() -> Iterator[Path]:
    """A directory with the module `hostile_rewards`, secrets beside it and in a run directory."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as monkeypatch:
        directory = Path(name)
        (directory / "hostile_rewards.py").write_text(MODULE)
        (directory / "key").write_text(SECRET)
        (directory / ".env").write_text(SECRET)
        for private in (directory / ".forge" / "runs", directory / "state"):
            private.mkdir(parents=True)
            (private / "key").write_text(SECRET)
            (private / "checkpoint").write_text(SECRET)
        monkeypatch.setenv("PYTHONPATH", f"{name}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.syspath_prepend(name)
        monkeypatch.chdir(directory)
        yield directory


@dataclass(frozen=True, kw_only=True)
class Rewards:
    pool: RewardPool

    async def value(self, expression: str, domain: str = "grade") -> float:
        task = RewardTask(task_id="t", domain=domain, payload={"expression": expression})
        (reward,) = await self.pool.score(Transcript(answer="", turns=1), task)
        return reward.value


def make_pool(directory: Path, *, network: bool = False, processes: int = 0) -> RewardPool:
    return RewardPool(
        {name: f"hostile_rewards:{name}" for name in ("grade", "crash")},
        limits=limits(processes),
        workers=1,
        sandbox=ProcessSandbox(
            modules=["hostile_rewards"],
            secrets=[str(directory / "key"), *map(str, directory.glob("*/**/key"))],
            network=network,
            tmp_bytes=2 << 20,
        ),
    )


@pytest_asyncio.fixture(scope="module")
async def rewards(modules: Path) -> AsyncIterator[Rewards]:
    """One process for the calls of all tests that need no other settings."""
    pool = make_pool(modules)
    try:
        await pool.check()
    except ConfigError as error:
        if "no sandbox" not in str(error):
            raise
        pytest.skip(str(error))
    yield Rewards(pool=pool)
    await pool.close()


async def test_files_of_the_host_are_absent(rewards: Rewards, modules: Path) -> None:
    """Keys, pools, checkpoints, private entries and homes cannot be read; modules can."""
    paths = [modules / "key", modules / ".env", modules / "state" / "checkpoint"]
    paths += [modules / ".forge" / "runs" / "key", modules / ".forge" / "runs" / "checkpoint"]
    paths += [Path("/etc/shadow"), Path("/etc/passwd"), Path("/var/lib"), Path.home() / ".profile"]
    for path in paths:
        read = f"Path({str(path)!r}).read_text()"
        assert await rewards.value(f"reached(lambda: len({read}) or -1)") == 0.0, path
    assert await rewards.value(f"reached(os.listdir, {str(modules)!r})") == 1.0


async def test_processes_of_the_host_are_absent(rewards: Rewards) -> None:
    """Neither memory nor environment of the runner, and no signal reaches it."""
    runner = os.getpid()
    for name in ("mem", "environ", "maps", "root/etc/shadow", "cwd"):
        assert await rewards.value(f"reached(open, '/proc/{runner}/{name}', 'rb')") == 0.0
    assert await rewards.value(f"reached(os.kill, {runner}, 0)") == 0.0
    assert await rewards.value(f"reached(libc.ptrace, 16, {runner}, 0, 0)") == 0.0
    listed = "float(max(int(name) for name in os.listdir('/proc') if name.isdigit()))"
    assert await rewards.value(listed) < 50


async def test_process_is_unprivileged(rewards: Rewards) -> None:
    """Never root, without capabilities; it cannot become root."""
    assert await rewards.value("float(os.getuid())") == bubblewrap.UNPRIVILEGED_ID
    status = "[line for line in open('/proc/self/status') if line[:6] == 'CapEff'][0]"
    assert await rewards.value(f"float(int({status}.split()[1], 16))") == 0.0
    assert await rewards.value("reached(os.setuid, 0)") == 0.0
    assert await rewards.value("reached(os.chroot, '/')") == 0.0


async def test_only_tmp_is_writable(rewards: Rewards, modules: Path) -> None:
    """Modules, packages and the system are read-only."""
    places = [modules, Path("/"), Path("/usr"), Path("/dev"), Path("/etc"), Path("/proc/sys")]
    places += [Path(sys.prefix), Path(__file__).parent, modules / ".forge"]
    for place in places:
        attempt = f"reached(open, {str(place / 'escaped')!r}, 'wb')"
        assert await rewards.value(attempt) == 0.0, place
    assert await rewards.value("reached(open, '/tmp/mine', 'wb')") == 1.0
    assert not Path("/tmp/mine").exists()


@pytest.mark.parametrize("directory", ["/tmp", "/dev/shm"])
async def test_written_bytes_of_a_call_are_bounded(rewards: Rewards, directory: str) -> None:
    """A full disk affects only its own call."""
    assert await rewards.value(f"filled({directory!r})") <= 2


async def test_network_needs_a_setting(rewards: Rewards, modules: Path) -> None:
    """A listener of the host is unreachable, by TCP and by an abstract UNIX socket, unless
    `network` is set."""
    name = f"\0forge-reward-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name)
        unix.listen()
        connect = f"reached(socket.create_connection, ('127.0.0.1', {tcp.getsockname()[1]}), 5)"
        by_name = f"reached(lambda: socket.socket(socket.AF_UNIX).connect({name!r}))"
        assert await rewards.value(connect) == 0.0
        assert await rewards.value(by_name) == 0.0
        pool = make_pool(modules, network=True)
        try:
            assert await Rewards(pool=pool).value(connect) == 1.0
        finally:
            await pool.close()


async def test_fork_bomb_is_bounded(modules: Path, rewards: Rewards) -> None:
    """The limit on processes holds for root runners too."""
    pool = make_pool(modules, processes=40)
    try:
        assert await Rewards(pool=pool).value("forks()") < 45
    finally:
        await pool.close()


async def test_all_reward_processes_end_with_the_pool(rewards: Rewards, modules: Path) -> None:
    """Also a child in its own session, which a kill of the process group misses."""
    pool = make_pool(modules)
    mark = f"forge-escape-{os.getpid()}"
    start = f"subprocess.Popen(['sleep', '600'], start_new_session=True, env={{'MARK': {mark!r}}})"
    assert await Rewards(pool=pool).value(f"float(bool({start}))") == 1.0

    def marked() -> bool:
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark.encode() in path.read_bytes():
                    return True
            except OSError:
                continue
        return False

    if os.getuid() == 0:
        # Until it has executed `sleep`, its environment is empty.
        await until(marked)
    await pool.close()
    await until(lambda: not marked())


async def test_files_of_reward_read_are_readable(modules: Path) -> None:
    """A wrong path is one line."""
    shown = modules / ".forge" / "runs" / "checkpoint"
    for path, answer in ((shown, 1.0), (modules / "nothing", None)):
        sandbox = ProcessSandbox(modules=["hostile_rewards"], read=[str(path)], tmp_bytes=1 << 20)
        functions = {"grade": "hostile_rewards:grade"}
        pool = RewardPool(functions, limits=limits(), sandbox=sandbox)
        if answer is None:
            with pytest.raises(ConfigError, match=r"reward_read: there is no .*nothing"):
                await pool.check()
            continue
        if problem := await sandbox.problem():
            pytest.skip(problem)
        assert await Rewards(pool=pool).value(f"reached(open, {str(path)!r})") == answer
        assert await Rewards(pool=pool).value(f"reached(open, {str(path)!r}, 'ab')") == 0.0
        await pool.close()


async def test_linked_module_directory_is_readable(
    rewards: Rewards, modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a link inside of a shown directory, as a virtual environment may be; a secret behind a
    link stays hidden."""
    real = tmp_path / "real"
    real.mkdir()
    (real / "linked_rewards.py").write_text(MODULE)
    (modules / "linked").symlink_to(real)
    monkeypatch.syspath_prepend(str(modules / "linked"))
    monkeypatch.setenv("PYTHONPATH", f"{modules / 'linked'}:{os.environ['PYTHONPATH']}")
    (real / "key").write_text(SECRET)
    sandbox = ProcessSandbox(secrets=[str(modules / "linked" / "key")], tmp_bytes=1 << 20)
    functions = {"grade": "linked_rewards:grade"}
    pool = RewardPool(functions, limits=limits(), sandbox=sandbox)
    await pool.check()
    for directory, name in itertools.product((real, modules / "linked"), ("key", "new")):
        path = str(directory / name)
        mode = "rb" if name == "key" else "wb"
        assert await Rewards(pool=pool).value(f"reached(open, {path!r}, {mode!r})") == 0.0
    await pool.close()
    (modules / "linked").unlink()


async def test_crash_is_reported_with_its_signal(rewards: Rewards) -> None:
    """bubblewrap reports the end of its child by an exit code."""
    with pytest.raises(RewardError, match="was killed by SIGSEGV"):
        await rewards.value("0", domain="crash")


async def test_host_without_bubblewrap_refuses_reward_functions(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one line that names the package, unless the setting allows functions there."""
    monkeypatch.setattr(bubblewrap, "executable", lambda: "/bin/false")
    functions = {"grade": "hostile_rewards:grade"}
    sandbox = ProcessSandbox(modules=["hostile_rewards"], tmp_bytes=1 << 20)
    refused = RewardPool(functions, limits=limits(), sandbox=sandbox)
    with pytest.raises(ConfigError, match=r"reward functions.*install bubblewrap.*unsafe_sandbox"):
        await refused.check()
    allowed = RewardPool(functions, limits=limits(), sandbox=sandbox, unsafe=True)
    await allowed.check()
    assert await Rewards(pool=allowed).value("7.0") == 7.0
    await allowed.close()


MASKED_PROC = "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys &&"
"""As ProtectKernelTunables= of the runner's unit."""
ATTACKS = """
import asyncio, os, sys
from tests.integration.test_reward_escapes import Rewards, make_pool
from pathlib import Path
async def main():
    pool = make_pool(Path(sys.argv[1]), processes=3000)
    await pool.check()
    print([await Rewards(pool=pool).value(expression) for expression in sys.argv[2:]])
    await pool.close()
asyncio.run(main())
"""


@pytest.mark.parametrize("masked", [False, True], ids=["plain /proc", "masked /proc"])
def test_sandbox_is_the_same_for_a_plain_user(modules: Path, masked: bool) -> None:
    """A runner without privileges: its user reads nothing of its own, and signals nothing. If
    systemd or a container masks parts of /proc, the kernel refuses a new one: there is none."""
    if os.getuid():
        pytest.skip("every test of this file has a plain user")
    for path in (modules, *modules.rglob("*")):
        os.chown(path, PLAIN_USER, PLAIN_USER)
    user = plain_user(modules, before=MASKED_PROC * masked)
    if user.problem:
        pytest.skip(user.problem)
    environment = os.environ | user.environment | {"HOME": "/nonexistent"}
    environment["PYTHONPATH"] = f"{modules}:{environment['PYTHONPATH']}"
    attacks = [f"reached(open, {str(modules / name)!r})" for name in ("key", ".env", "state/key")]
    attacks += [f"reached(open, {str(modules / 'escaped')!r}, 'wb')", "filled('/tmp') - 2"]
    attacks += [f"reached(os.kill, {os.getppid()}, 0)", f"reached(open, '/proc/{os.getpid()}/mem')"]
    attacks += ["reached(os.setuid, 0)", "reached(socket.create_connection, ('127.0.0.1', 22), 1)"]
    ended = subprocess.run(
        [*user.words, "-c", ATTACKS, str(modules), "reached(os.getpid)", *attacks],
        env=environment,
        cwd=modules,
        text=True,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    first, *reached = json.loads(ended.stdout.splitlines()[-1])
    assert first == 1.0
    assert max(reached) == 0.0, dict(zip(attacks, reached, strict=True))
