"""The whole life of a service process: a real one, started, used, drained and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from forge.core.errors import Unavailable
from forge.runtime.coordination import Coordinator
from forge.runtime.coordination.etcd import Etcd
from forge.runtime.process.service import _Process
from forge.runtime.security.tokens import Keyring
from tests.support.runtime.echo import EchoStub
from tests.support.runtime.echo_service import EchoApp, EchoConfig
from tests.support.runtime.etcd import EtcdServer, free_port
from tests.support.runtime.log_lines import log_lines
from tests.support.runtime.waiting import until

START_S = 240.0
"""Until a process has started or ended, on a machine with ten others to run."""


class Process:
    """One echo service as a child process."""

    def __init__(
        self, folder: Path, endpoint: str, cluster: str, *flags: str, unit_process: str
    ) -> None:
        Keyring.generate(folder / "key")
        self.log = folder / "echo.log"
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._notify.bind(str(folder / "notify"))
        command = [sys.executable, "-m", "tests.support.runtime.echo_service"]
        command += ["--etcd", endpoint, "--cluster", cluster, "--key-file", str(folder / "key")]
        command += ["--log-file", str(self.log), "--instance-id", "echo-1"]
        # A stall of some seconds shall not put it out of discovery.
        command += ["--lease-ttl-s", "30"]
        systemd = {"NOTIFY_SOCKET": str(folder / "notify")}
        # The shell stays the same process when it becomes the service.
        shell = ["sh", "-c", f'export SYSTEMD_EXEC_PID={unit_process}; exec "$0" "$@"']
        self.child = subprocess.Popen(
            [*shell, *command, *flags],
            stderr=subprocess.PIPE,
            env={**os.environ, **systemd},
            cwd=Path(__file__).parents[2],
            text=True,
        )

    def notified(self) -> list[str]:
        """What systemd has been told since it was last asked."""
        messages = []
        while True:
            try:
                messages.append(self._notify.recv(4096).decode())
            except BlockingIOError:
                return messages

    async def next_notice(self) -> str:
        """The next thing that systemd is told."""
        async with asyncio.timeout(START_S):
            notice = await asyncio.get_running_loop().sock_recv(self._notify, 4096)
            return notice.decode()

    async def ended(self) -> int:
        return await asyncio.to_thread(self.child.wait, START_S)

    def errors(self) -> str:
        assert self.child.stderr is not None
        return self.child.stderr.read()

    def events(self) -> list[str]:
        return [line["event"] for line in self.lines()]

    def lines(self) -> list[dict[str, Any]]:
        return log_lines(self.log)

    async def logged(self, event: str) -> dict[str, Any]:
        """The line of that event, once it is there."""
        return (await until(lambda: [line for line in self.lines() if line["event"] == event]))[0]

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        self._notify.close()


Start = Callable[..., Process]


@pytest_asyncio.fixture
async def start(tmp_path: Path, etcd: EtcdServer, cluster: str) -> AsyncIterator[Start]:
    """Starts the service with the given flags; ends it after the test."""
    started: list[Process] = []

    def start(*flags: str, endpoint: str = etcd.endpoint, unit_process: str = "$$") -> Process:
        made = Process(tmp_path, endpoint, cluster, *flags, unit_process=unit_process)
        started.append(made)
        return started[-1]

    yield start
    for process in started:
        process.close()


async def say(address: str, text: str) -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        answer: bytes = await EchoStub(channel).Unary(text.encode(), timeout=START_S)
        return answer.decode()


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_service_starts_serves_drains_and_exits_with_zero(
    start: Start, coordinator: Coordinator, number: signal.Signals
) -> None:
    """A signal: leave discovery, finish the running stream, stop actors, close stores, exit 0."""
    process = start("--drain-s", "240")
    discovery = coordinator.discover("echo")
    (instance,) = await discovery.wait(timeout_s=START_S)
    assert (instance.instance_id, instance.metadata["color"]) == ("echo-1", "red")
    assert await say(instance.address, "say:hello") == "hello"
    assert await process.next_notice() == "READY=1"
    async with grpc.aio.insecure_channel(instance.address) as channel:
        in_flight = EchoStub(channel).StreamStream(timeout=START_S)
        await in_flight.write(b"say:before")
        assert await in_flight.read() == b"before"
        process.child.send_signal(number)
        while discovery.instances:
            await asyncio.wait_for(discovery.changed(), START_S)
        await in_flight.write(b"say:while it drains")
        assert await in_flight.read() == b"while it drains"
        assert process.child.poll() is None
        await in_flight.done_writing()
        assert await in_flight.read() is grpc.aio.EOF
    assert await process.ended() == 0
    assert process.errors() == ""
    assert process.notified() == ["STOPPING=1"]
    assert process.events() == [
        "starting",
        "serving",
        "draining",
        "echo_drained",
        "echo_stopped",
        "stopped",
    ]


async def test_unit_outlives_a_child_of_its_process(start: Start) -> None:
    """systemd would kill a unit that says it stops, and does not: torchrun starts ranks again."""
    process = start(unit_process="1")
    assert await process.next_notice() == "READY=1"
    process.child.terminate()
    assert await process.ended() == 0
    assert process.notified() == []


async def test_every_log_line_has_service_and_instance(
    start: Start, coordinator: Coordinator
) -> None:
    """Lines of many processes in one place are distinguishable."""
    process = start()
    await coordinator.discover("echo").wait(timeout_s=START_S)
    for line in process.lines():
        assert (line["service"], line["instance"]) == ("echo", "echo-1")
        assert {"event", "level", "timestamp"} <= line.keys()


async def test_metrics_are_served_at_the_registered_address(
    start: Start, coordinator: Coordinator
) -> None:
    """Prometheus finds every process through etcd and gets its calls and actors."""
    start()
    (instance,) = await coordinator.discover("echo").wait(timeout_s=START_S)
    await say(instance.address, "say:x")
    url = f"http://{instance.metadata['metrics']}/metrics"
    text = await asyncio.to_thread(
        lambda: urllib.request.urlopen(url, timeout=START_S).read().decode()
    )
    assert 'forge_rpc_calls_total{code="OK",method="/test.Echo/Unary"} 1.0' in text
    assert 'forge_actor_mailbox_depth{actor="Worker"} 0.0' in text


async def test_announced_metadata_reaches_discovery(start: Start, coordinator: Coordinator) -> None:
    """A service changes its metadata while it runs."""
    start()
    discovery = coordinator.discover("echo")
    (instance,) = await discovery.wait(timeout_s=START_S)
    await say(instance.address, "paint:blue")
    await discovery.wait(timeout_s=START_S, where=lambda one: one.metadata["color"] == "blue")


async def test_metadata_changed_during_the_registration_is_announced(
    tmp_path: Path,
    etcd: EtcdServer,
    cluster: str,
    coordinator: Coordinator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others find a service before it knows that it is registered, and call it."""
    Keyring.generate(tmp_path / "key")
    config = EchoConfig(
        etcd=etcd.endpoint, cluster=cluster, key_file=str(tmp_path / "key"), instance_id="echo-1"
    )
    process = _Process("echo", config, EchoApp)
    swap, swaps = Etcd.swap, count()

    async def painted_before_the_answer(*arguments: Any, **options: Any) -> int | None:
        revision = await swap(*arguments, **options)
        if next(swaps) == 0:
            process._context.metadata["color"] = "blue"
            await process._context.announce()
        return revision

    monkeypatch.setattr(Etcd, "swap", painted_before_the_answer)
    async with AsyncExitStack() as undo:
        await process._start(undo)
        undo.push_async_callback(process._drain)
        await coordinator.discover("echo").wait(
            timeout_s=START_S, where=lambda one: one.metadata["color"] == "blue"
        )


async def test_registration_waits_for_an_etcd_that_does_not_answer(
    tmp_path: Path,
    etcd: EtcdServer,
    cluster: str,
    coordinator: Coordinator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The app has started and may have work: a runner that lost its programs to a slow etcd was
    gone for good. The first write has an unknown outcome, then a write and a read fail."""
    Keyring.generate(tmp_path / "key")
    config = EchoConfig(
        etcd=etcd.endpoint,
        cluster=cluster,
        key_file=str(tmp_path / "key"),
        instance_id="echo-1",
        voice="low",
    )
    process = _Process("echo", config, EchoApp)
    swap, listed = Etcd.swap, Etcd.list
    failing = iter(("after", "before"))
    unread = iter(("once",))

    async def swap_with_outage(*arguments: Any, **options: Any) -> int | None:
        when = next(failing, "")
        revision = None if when == "before" else await swap(*arguments, **options)
        if when:
            raise Unavailable("no answer from etcd")
        return revision

    async def list_with_outage(*arguments: Any, **options: Any) -> Any:
        if process._context.registration is not None and next(unread, ""):
            raise Unavailable("no answer from etcd")
        return await listed(*arguments, **options)

    monkeypatch.setattr(Etcd, "swap", swap_with_outage)
    monkeypatch.setattr(Etcd, "list", list_with_outage)
    async with AsyncExitStack() as undo:
        await process._start(undo)
        undo.push_async_callback(process._drain)
        await coordinator.discover("echo").wait(timeout_s=START_S)
    assert (next(failing, None), next(unread, None)) == (None, None)


async def test_service_that_is_not_ready_is_up_but_not_in_discovery(
    start: Start, coordinator: Coordinator
) -> None:
    """systemd gets READY; discovery has it only once it can serve."""
    process = start("--becomes-ready", "false")
    assert await process.next_notice() == "READY=1"
    discovery = coordinator.discover("echo")
    await discovery.known()
    assert discovery.instances == ()
    await say((await process.logged("waiting_to_be_ready"))["address"], "ready")
    await discovery.wait(timeout_s=START_S)


async def test_service_that_is_not_ready_can_be_stopped(start: Start) -> None:
    """A wait for weights does not delay it."""
    process = start("--becomes-ready", "false")
    assert await process.next_notice() == "READY=1"
    process.child.send_signal(signal.SIGINT)
    assert await process.ended() == 0
    assert process.events()[-4:] == ["draining", "echo_drained", "echo_stopped", "stopped"]


async def test_service_that_waits_for_its_registration_is_drained(
    start: Start, own_etcd: EtcdServer
) -> None:
    """SIGTERM meanwhile: its accepted work is finished."""
    process = start("--becomes-ready", "false", endpoint=own_etcd.endpoint)
    assert await process.next_notice() == "READY=1"
    address = (await process.logged("waiting_to_be_ready"))["address"]
    own_etcd.kill()
    await say(address, "ready")
    await process.logged("registration_waits")
    process.child.terminate()
    assert await process.ended() == 0
    assert [event for event in process.events() if event.startswith("echo")] == [
        *("echo_drained", "echo_stopped")
    ]


async def test_killed_service_leaves_discovery_with_its_lease(
    start: Start, coordinator: Coordinator
) -> None:
    """kill -9 needs no code: the lease expires."""
    process = start("--lease-ttl-s", "2")
    discovery = coordinator.discover("echo")
    await discovery.wait(timeout_s=START_S)
    process.child.kill()
    while discovery.instances:
        await asyncio.wait_for(discovery.changed(), START_S)


FAULTS = {"break": (1, "KeyError: 'break'"), "misset": (2, "ConfigError: red is no voice")}


@pytest.mark.parametrize(("word", "end"), FAULTS.items())
async def test_failed_part_ends_the_process_with_its_cause(
    start: Start, coordinator: Coordinator, word: str, end: tuple[int, str]
) -> None:
    """A restart helps after 1, not after 2: an actor crashed, a setting was wrong."""
    process = start()
    await say((await coordinator.discover("echo").wait(timeout_s=START_S))[0].address, word)
    assert (await process.ended(), process.lines()[-1]["error"]) == end
    assert process.errors() == ("forge echo: red is no voice\n" if word == "misset" else "")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--fail-start"], "forge echo: the store is locked by another process\n"),
        (
            ["--drain-s", "-1"],
            "forge echo: --drain-s: drain_s = '-1' is not allowed: a number from 0 to 3600\n",
        ),
        (
            ["--host", "0.0.0.0"],
            "forge echo: host = '0.0.0.0' is not a loopback address, so TLS is needed: set "
            "tls_cert, tls_key and tls_ca (or insecure = true on a network you trust)\n",
        ),
        (
            ["--host", "0.0.0.0", "--insecure", "true"],
            "forge echo: host = '0.0.0.0' is every address of this host and none that others could "
            "call: set advertise_host to the one they reach it by\n",
        ),
        (
            ["--key-file", "/no/such"],
            "forge echo: key_file = '/no/such': No such file or directory\n",
        ),
    ],
)
async def test_failed_start_is_one_line_on_stderr_and_exit_code_2(
    start: Start, flags: list[str], line: str
) -> None:
    """No traceback: the fault and the remedy."""
    process = start(*flags)
    assert await process.ended() == 2
    assert process.errors() == line


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
async def test_occupied_port_is_named(start: Start, flag: str) -> None:
    """The line has address and port and a way out."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        process = start(flag, str(port))
        assert await process.ended() == 2
    errors = process.errors()
    assert f"127.0.0.1:{port}" in errors
    assert flag in errors
    assert errors.count("\n") == 1


async def test_unreachable_etcd_is_named(start: Start) -> None:
    """The line has the endpoint and the setting; a supervisor may try again."""
    process = start(endpoint=(endpoint := f"127.0.0.1:{free_port()}"))
    assert await process.ended() == 1
    errors = process.errors()
    assert errors.startswith(f"forge echo: no etcd answers at {endpoint}: ")
    assert "--etcd" in errors
    assert errors.count("\n") == 1
