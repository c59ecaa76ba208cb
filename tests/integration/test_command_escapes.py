"""Hostile commands reach nothing of their host, with a runner of root or of a plain user.

One program tries every attack and reports those that succeeded. On the host, without a sandbox,
each attack that the user of the runner can make succeeds: an attack that cannot succeed proves
nothing.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.agents.container_engine import ENGINES, IMAGE, READ, engine
from tests.support.agents.plain_user import PLAIN_USER, REPOSITORY, plain_user

pytestmark = pytest.mark.faults

SECRET = "a-secret-of-the-runner"
PROCESSES = 40
TMP_MIB = 8
MEMORY_MIB = 256
TIMEOUT_S = 300.0
ATTACKS = """
import ctypes, json, os, socket, urllib.request
facts = json.loads(os.environ["FORGE_TASK_JSON"])["inputs"]
runner, key, victim = (facts[name] for name in ("runner", "key", "victim"))
libc = ctypes.CDLL(None, use_errno=True)

class Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))

def in_child(attempt):
    "whether the attempt succeeds in a process of its own"
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    try:
        succeeded = attempt()
    except (OSError, MemoryError):
        succeeded = False
    finally:
        os._exit(0 if succeeded else 1)

def reads_key():
    return open(key).read() == facts["secret"]

def deletes_file():
    os.remove(victim)
    return True

def writes_beside_it():
    open(os.path.dirname(victim) + "/written", "w").close()
    return False  # The host looks for the file: /tmp of a sandbox is its own.

def sees_environment():
    return facts["secret"].encode() in open(f"/proc/{runner}/environ", "rb").read()

def sees_processes():
    return str(runner) in os.listdir("/proc")

def reads_memory():
    found = ctypes.create_string_buffer(len(facts["secret"]))
    local = Vector(ctypes.addressof(found), len(facts["secret"]))
    remote = Vector(facts["address"], len(facts["secret"]))
    read = libc.process_vm_readv(runner, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    return read > 0 and found.raw.decode() == facts["secret"]

def signals_runner():
    os.kill(runner, 0)
    return True

def connects_by_tcp():
    socket.create_connection(("127.0.0.1", facts["port"]), 5).close()
    return True

def connects_by_name():
    socket.socket(socket.AF_UNIX).connect(facts["name"])
    return True

def opens_vsock():
    socket.socket(socket.AF_VSOCK).close()
    return True

def opens_device():
    return os.open(facts["device"], os.O_RDONLY) >= 0

def forks_without_bound():
    children = []
    try:
        while len(children) < 100:
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
    return len(children) == 100

def fills_disk():
    with open(os.environ["TMPDIR"] + "/bomb", "wb", buffering=0) as bomb:
        for number in range(24):
            if bomb.write(bytes(1 << 20)) < 1 << 20:
                return False
    return True

def fills_memory():
    return in_child(lambda: bool(bytearray(b"x") * (600 << 20)))

def makes_user_namespace():
    return in_child(lambda: libc.unshare(0x10000000) == 0)

def is_root():
    return os.getuid() == 0

def reaches_gateway():
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models")
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    return urllib.request.urlopen(request, timeout=30).status == 200

def attempts():
    for name, attempt in list(globals().items()):
        if name.split("_")[0] in ("reads", "deletes", "writes", "sees", "signals", "connects",
                                  "opens", "forks", "fills", "makes", "is", "reaches"):
            try:
                if attempt():
                    yield name
            except (OSError, MemoryError, AttributeError, ValueError):
                pass

print(json.dumps(list(attempts())))
"""
RUNNER = """
import asyncio, ctypes, json, os, sys
from forge.agents.config import RunnerConfig
from forge.agents.command_setup import make_command
from tests.support.agents.scripted_gateway import ScriptedGateway, replay, text
from tests.support.agents.tasks import SumEpisode, rollout
settings, inputs = json.loads(sys.argv[1]), json.loads(sys.argv[2])
held = ctypes.create_string_buffer(inputs["secret"].encode())
inputs |= {"runner": os.getpid(), "address": ctypes.addressof(held)}
async def main():
    lists = {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
    command = make_command(RunnerConfig(**settings | lists))
    await command.check()
    async with ScriptedGateway(replay(text("4"))) as gateway:
        attempt = rollout(gateway, inputs=inputs)
        print((await command.run(attempt, SumEpisode(4))).answer)
    await command.close()
asyncio.run(main())
"""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A runner's user, and a directory of it: its key, a file, and the program of the attacks."""

    words: tuple[str, ...]
    environment: dict[str, str]
    directory: Path
    python: Path
    user: int

    def attack(self, sandbox: str, **settings: object) -> set[str]:
        """Returns the attacks that succeeded, of a command in such a sandbox."""
        for name in ("key", "victim"):
            path = self.directory / name
            path.write_text(SECRET)
            path.chmod(0o600)
            os.chown(path, self.user, -1)
        (self.directory / "written").unlink(missing_ok=True)
        shown = self.directory / "shown"
        inputs = {
            "secret": SECRET,
            "key": str(self.directory / "key"),
            "victim": str(self.directory / "victim"),
            "device": str(shown / "device"),
            "name": f"\0forge-command-{os.getpid()}",
        }
        settings |= {
            "command_sandbox": sandbox,
            "command": f"{self.python} {shown / 'attacks.py'}",
            "key_file": inputs["key"],
        }
        with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
            unix.bind(inputs["name"])
            unix.listen()
            told = (settings, inputs | {"port": tcp.getsockname()[1]})
            done = subprocess.run(
                [*self.words, "-c", RUNNER, *map(json.dumps, told)],
                env=os.environ | self.environment,
                cwd=self.directory,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        assert done.returncode == 0, done.stderr[-3000:]
        found = set(json.loads(done.stdout.splitlines()[-1]))
        return found | {"writes_beside_it"} if (self.directory / "written").exists() else found


@pytest.fixture(params=["root", "plain user"], scope="module")
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A runner of root, and one without any privilege."""
    if request.param == "root" and os.getuid():
        pytest.skip("the suite is not root")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "shown").mkdir(mode=0o755)
        (directory / "shown" / "attacks.py").write_text(ATTACKS)
        if os.getuid() == 0:
            os.mknod(directory / "shown" / "device", 0o20666, os.makedev(1, 11))
            (directory / "shown" / "device").chmod(0o666)
        environment = {"FORGE_SECRET": SECRET, "PYTHONPATH": str(REPOSITORY)}
        if request.param == "root" or os.getuid():
            python = Path(sys.executable)
            yield Host(words=(str(python),), environment=environment, directory=directory,
                       python=python, user=os.getuid())  # fmt: skip
            return
        user = plain_user(directory)
        if user.problem:
            pytest.skip(user.problem)
        yield Host(words=user.words, environment=environment | user.environment,
                   directory=directory, python=user.python, user=PLAIN_USER)  # fmt: skip


def every_attack(host: Host) -> set[str]:
    """Those that the user of the runner can make on this kernel."""
    names = {line[4:-3] for line in ATTACKS.splitlines() if line[:4] == "def " and "():" in line}
    names -= {"attempts"}
    try:
        socket.socket(getattr(socket, "AF_VSOCK", -1)).close()
    except OSError:
        names.discard("opens_vsock")
    if subprocess.run(["unshare", "--user", "true"], capture_output=True).returncode:
        names.discard("makes_user_namespace")
    # The device is the log of the kernel.
    if os.getuid() or (host.user and Path("/proc/sys/kernel/dmesg_restrict").read_text() != "0\n"):
        names.discard("opens_device")
    return names if host.user == 0 else names - {"is_root"}


def test_every_attack_succeeds_without_a_sandbox(host: Host) -> None:
    """`command_sandbox = none` is the runner's own power, so the attacks are real."""
    found = host.attack("none", command_memory_mb=0, command_processes=0)
    assert found == every_attack(host)


def limits() -> dict[str, object]:
    return {
        "command_memory_mb": MEMORY_MIB,
        "command_processes": PROCESSES,
        "command_tmp_mb": TMP_MIB,
    }


def test_bubblewrap_stops_every_attack(host: Host) -> None:
    """The gateway is all that a command reaches, and its /tmp all that it writes."""
    assert host.attack("bubblewrap", **limits()) == {"reaches_gateway"}
    assert (host.directory / "victim").read_text() == SECRET


def test_network_of_the_host_needs_a_setting(host: Host) -> None:
    """`command_network = host` opens the listeners of the host, and nothing else."""
    found = host.attack("bubblewrap", command_network="host", **limits())
    assert found == {"reaches_gateway", "connects_by_tcp", "connects_by_name"}


@pytest.mark.parametrize("name", ENGINES)
def test_container_stops_every_attack(host: Host, name: str) -> None:
    """With podman and with docker."""
    words, problem = engine(name)
    if problem:
        pytest.skip(problem)
    if host.user != os.getuid():
        pytest.skip("the engine of the plain user has no image")
    read = [*READ, str(host.directory / "shown"), str(Path(sys.executable).parents[1])]
    settings = {"container_engine": " ".join(words), "container_image": IMAGE, "command_read": read}
    assert host.attack("container", **settings, **limits()) == {"reaches_gateway"}
    assert (host.directory / "victim").read_text() == SECRET
