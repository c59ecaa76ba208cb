"""Hostile programs of a model reach nothing of their host, with a runner of root or a plain user.

Each program first disables the audit hook, so the kernel alone contains it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from forge.agents.sandbox.program_sandbox import Sandbox
from tests.support.agents.plain_user import REPOSITORY, plain_user
from tests.support.runtime.waiting import until

pytestmark = pytest.mark.faults

SECRET = "a-secret-of-the-runner"
RUNNER = """
import asyncio, dataclasses, json, sys
from forge.agents.sandbox.program_sandbox import Sandbox
async def main():
    sandbox = Sandbox()
    print(await sandbox.problem(), flush=True)
    print(json.dumps(dataclasses.asdict(await sandbox.run(sys.argv[1]))))
asyncio.run(main())
"""
HOSTILE = """
import sys
class Everything:
    def __contains__(self, event):
        return True
hook = sys._getframe(1).f_globals
hook["allowed"] = Everything()
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def refused(attempt, *arguments):
    try:
        result = attempt(*arguments)
    except (OSError, AttributeError, ImportError, RuntimeError, MemoryError, ValueError) as error:
        print("refused", type(error).__name__)
    else:
        print("refused" if result == -1 else f"LEAK {result!r:.200}")
"""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Runs programs in the sandbox of a runner of one user."""

    words: tuple[str, ...]
    environment: dict[str, str]
    directory: Path
    """Everything in it belongs to the user of the runner."""

    def start(self, program: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.words, "-c", RUNNER, HOSTILE + program],
            env=os.environ | self.environment,
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str) -> tuple[str, str]:
        """Returns output and error of the program."""
        output, errors = self.start(program).communicate()
        assert output.count("\n") == 2, (output, errors)
        result = json.loads(output)
        return result["output"], result["error"]

    def refuses(self, program: str) -> None:
        """Asserts that every attempt of the program failed, and that there was one."""
        output, error = self.run(program)
        assert "refused" in output, (output, error)
        assert "LEAK" not in output

    def file(self, name: str) -> Path:
        path = self.directory / name
        path.write_text(SECRET)
        os.chown(path, self.directory.stat().st_uid, -1)
        return path


@pytest.fixture(params=["root", "plain user"])
async def host(request: pytest.FixtureRequest) -> AsyncIterator[Host]:
    """A runner of root, and one without any privilege."""
    if problem := await Sandbox().problem():
        pytest.skip(problem)
    if request.param == "root" and os.getuid():
        pytest.skip("the suite is not root")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        environment = {"FORGE_SECRET": SECRET, "PYTHONPATH": str(REPOSITORY)}
        if request.param == "root" or os.getuid():
            yield Host(words=(sys.executable,), environment=environment, directory=directory)
            return
        user = plain_user(directory)
        if user.problem:
            pytest.skip(user.problem)
        environment |= user.environment
        yield Host(words=user.words, environment=environment, directory=directory)


def test_files_of_the_host_are_absent(host: Host) -> None:
    """Neither those of the system, nor those of the runner: its key, its code, its packages."""
    key = host.file("key")
    paths = [
        key,
        REPOSITORY / "pyproject.toml",
        Path(pytest.__file__),
        "/etc/passwd",
        "/etc/shadow",
    ]
    paths += [
        "/etc/hostname",
        "/proc/self/environ",
        "/proc/version",
        "/sys/kernel",
        "/var",
        "/home",
    ]
    paths += ["/bin/sh", "/usr/bin/env", "/proc/1/root"]
    host.refuses(f"for path in {list(map(str, paths))}: refused(os.stat, path)\n")
    # The root of the sandbox has few directories.
    output, _ = host.run("print(os.listdir('/tmp/..'))")
    assert not {"proc", "sys", "home", "var", "bin", "opt"} & set(output.split("'"))


def test_environment_and_memory_of_the_runner_are_absent(host: Host) -> None:
    """No variable, no descriptor and no /proc leads to it."""
    output, error = host.run(
        "print(dict(os.environ))\n"
        "for fd in range(3, 64): refused(os.fstat, fd)\n"
        "for pid in (1, 2, os.getpid(), os.getppid()):\n"
        "    for name in ('environ', 'mem', 'maps', 'fd', 'root'):\n"
        "        refused(os.stat, f'/proc/{pid}/{name}')\n"
    )
    assert SECRET not in output
    assert "LEAK" not in output, error


def test_shell_cannot_delete_a_file_of_the_host(host: Host) -> None:
    """Neither in a child, which `_posixsubprocess` starts below the audit hook, nor in place."""
    victim = host.file("victim")
    arguments = f"[b'sh', b'-c', b'rm -f {victim}'], [b'/bin/sh']"
    host.refuses(
        "import _posixsubprocess\n"
        f"refused(_posixsubprocess.fork_exec, {arguments}, True, (), None, [b'A=1'], "
        "-1, -1, -1, -1, -1, -1, -1, 3, True, False, -1, None, None, None, -1, None, False)\n"
        f"refused(os.posix_spawn, '/bin/sh', ['sh', '-c', 'rm -f {victim}'], {{}})\n"
        f"refused(lambda: -1 if os.system('rm -f {victim}') else 0)\n"
        f"refused(os.remove, {str(victim)!r})\n"
        f"refused(os.execv, '/bin/sh', ['sh', '-c', 'rm -f {victim}'])\n"
    )
    assert victim.read_text() == SECRET


def test_no_process_of_the_host_gets_a_signal(host: Host) -> None:
    """Not even the runner; the program cannot see the processes."""
    pids = [os.getpid(), os.getppid(), -1, 1, 0]
    host.refuses(
        f"for pid in {pids}: refused(os.kill, pid, 9)\n"
        "import signal\n"
        "refused(signal.pidfd_send_signal, 0, 9)\n"
        "refused(os.pidfd_open, 1)\n"
    )


def test_no_listener_of_the_host_is_reachable(host: Host) -> None:
    """Neither by TCP on loopback nor by an abstract UNIX socket, which files do not protect."""
    name = f"\0forge-escape-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name)
        unix.listen()
        port = tcp.getsockname()[1]
        host.refuses(
            f"refused(socket.create_connection, ('127.0.0.1', {port}), 1)\n"
            f"refused(lambda: socket.socket(socket.AF_UNIX).connect({name!r}))\n"
            "for family in range(1, 46):\n"
            "    for kind in (1, 2, 3): refused(socket.socket, family, kind)\n"
        )
        for listener in (tcp, unix):
            listener.settimeout(0)
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_devices_are_absent(host: Host) -> None:
    """None can be opened, and none can be created."""
    devices = ["/dev/mem", "/dev/kmsg", "/dev/fuse", "/dev/kvm", "/dev/tty", "/dev/ptmx"]
    devices += [f"/dev/{path.name}" for path in Path("/sys/block").iterdir()]
    host.refuses(
        f"for device in {devices}: refused(os.open, device, os.O_RDONLY)\n"
        "refused(os.mknod, '/tmp/disk', 0o60666, os.makedev(254, 0))\n"
        "refused(os.mkfifo, '/tmp/fifo')\n"
    )


def test_fork_bomb_is_one_process(host: Host) -> None:
    """Forks, threads and `clone` are refused, so nothing outlives the program."""
    output, _ = host.run(
        # Where a fork succeeds, the child ends at once: a failed test must not flood its host.
        "fork = lambda: os.fork() or os._exit(0)\n"
        "for _ in range(200):\n"
        "    refused(fork)\n"
        "import _thread\n"
        "refused(_thread.start_new_thread, print, ())\n"
        "refused(libc.syscall, 56, 0, 0, 0, 0, 0)\n"
        "refused(os.setsid)\n"
    )
    assert output.count("refused") >= 203
    assert "LEAK" not in output


def test_memory_bomb_ends_the_program_only(host: Host) -> None:
    """The limit covers private memory; memory outside of an address space cannot be created."""
    host.refuses(
        "import mmap, resource\n"
        "refused(bytearray, 1 << 30)\n"
        "refused(mmap.mmap, -1, 1 << 30)\n"
        "refused(os.memfd_create, 'bomb')\n"
        "refused(libc.shmget, 0, 1 << 30, 0o1600)\n"
        "refused(os.pipe)\n"
        "refused(os.eventfd, 0)\n"
        "for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):\n"
        "    refused(resource.setrlimit, kind, (1 << 40, 1 << 40))\n"
    )


def test_program_cannot_write_any_file(host: Host) -> None:
    """No directory accepts a file, a link or a byte."""
    victim = host.file("victim")
    directories = [
        "/",
        "/tmp",
        "/dev",
        "/dev/shm",
        "/etc",
        "/usr/lib",
        "/var/tmp",
        str(host.directory),
    ]
    host.refuses(
        "import os.path\n"
        f"for directory in {directories} + sys.path:\n"
        "    path = directory + '/bomb'\n"
        "    refused(os.open, path, os.O_CREAT | os.O_WRONLY)\n"
        "    refused(os.mkdir, path)\n"
        f"    refused(os.symlink, {str(victim)!r}, path)\n"
        f"    refused(os.link, {str(victim)!r}, path)\n"
        "    refused(lambda: os.chmod(directory, os.stat(directory).st_mode & 0o7777))\n"
    )
    assert victim.read_text() == SECRET


def test_program_cannot_gain_privileges(host: Host) -> None:
    """Neither by becoming root, nor by a namespace of its own, nor over another process."""
    host.refuses(
        "refused(os.setuid, 0)\n"
        "refused(os.setresuid, 0, 0, 0)\n"
        "refused(os.chroot, '/')\n"
        "for flag in (0x10000000, 0x20000, 0x20000000): refused(libc.unshare, flag)\n"
        "refused(libc.mount, b'none', b'/tmp', b'tmpfs', 0, None)\n"
        "for request in (0, 16, 0x4206): refused(libc.ptrace, request, os.getppid(), 0, 0)\n"
        "refused(libc.syscall, 310, os.getppid(), 0, 0, 0, 0, 0)\n"
        "for number in (175, 246, 248, 250, 298, 304, 321, 323, 425):\n"
        "    refused(libc.syscall, number, 0, 0, 0, 0, 0)\n"
    )


async def test_program_is_nobody_without_capabilities(host: Host) -> None:
    """As the kernel reports: user, capabilities, privileges, filter and namespaces."""
    runner = host.start("import signal\nsignal.sigwait([signal.SIGUSR1])")
    assert runner.stdout
    assert not runner.stdout.readline().strip()

    def program() -> list[psutil.Process]:
        tree = psutil.Process(runner.pid).children(recursive=True)
        with suppress(psutil.NoSuchProcess):
            # The last process has no child: bubblewrap's own are above it.
            return [p for p in tree[-1:] if "-I" in p.cmdline()[:2]]
        return []

    (process,) = await until(program)
    await until(lambda: _status(process.pid)["Uid"][0] != "0")
    try:
        kept = _status(process.pid)
        assert not {"0"} & {*kept["Uid"], *kept["Gid"]}
        assert int(kept["CapPrm"][0], 16) == 0
        assert (kept["NoNewPrivs"], kept["Seccomp"]) == (["1"], ["2"])
        for name in ("pid", "net", "ipc", "uts", "mnt"):
            mine = Path(f"/proc/self/ns/{name}").readlink()
            assert Path(f"/proc/{process.pid}/ns/{name}").readlink() != mine
    finally:
        runner.kill()
        runner.communicate()
    _, alive = await asyncio.to_thread(psutil.wait_procs, [process], timeout=60)
    assert not alive


def _status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
