"""Instances start only with the settings of those that run, where these must be equal."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from forge.core.errors import ConfigError
from forge.runtime.coordination import Coordinator
from forge.runtime.process.agreement import Agreement
from forge.runtime.security.tokens import Keyring
from tests.support.runtime.echo_service import EchoConfig
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.log_lines import log_lines
from tests.support.runtime.service_process import ServiceProcess, start_service
from tests.support.runtime.waiting import until

pytestmark = pytest.mark.timeout(600)

START_S = 240.0
ECHO = "tests.support.runtime.echo_service"

Start = Callable[..., ServiceProcess]


@pytest_asyncio.fixture
async def start(tmp_path: Path, etcd: EtcdServer, cluster: str) -> AsyncIterator[Start]:
    """Starts a service with an instance id and flags; kills it after the test."""
    Keyring.generate(tmp_path / "key")
    started: list[ServiceProcess] = []

    def start(module: str, instance_id: str, *flags: str) -> ServiceProcess:
        argv = ["--etcd", etcd.endpoint, "--cluster", cluster, "--key-file", str(tmp_path / "key")]
        argv += ["--instance-id", instance_id, "--lease-ttl-s", "2", *flags]
        started.append(start_service(module, *argv, stderr=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


async def registered(coordinator: Coordinator, kind: str, instance_id: str) -> None:
    await coordinator.discover(kind).wait(
        timeout_s=START_S, where=lambda one: one.instance_id == instance_id
    )


async def refusal(process: ServiceProcess) -> str:
    """The last line of a process that ends with exit code 2."""
    _, stderr = await asyncio.to_thread(process.communicate, timeout=START_S)
    assert process.wait() == 2, stderr
    return str(stderr.strip().rpartition("\n")[2])


def model(folder: Path, **config: object) -> Path:
    folder.mkdir()
    small = {"architectures": ["Tiny"], "vocab_size": 64, "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(small | config))
    return folder


async def test_standby_scheduler_with_another_window_is_refused(
    start: Start, coordinator: Coordinator
) -> None:
    """One line names the setting, both values and both instances; with equal settings it stands
    by."""
    start("services.scheduler", "a", "--queue.window=4", "--takeover-hold-s=1")
    await registered(coordinator, "scheduler", "a")
    line = await refusal(start("services.scheduler", "b", "--queue.window=5"))
    for part in ("window = 5 of scheduler b", "4 of scheduler a", "--accept-differing"):
        assert part in line
    # It is the leader's own affair how long it holds rollouts back.
    start("services.scheduler", "c", "--queue.window=4", "--takeover-hold-s=2")
    await registered(coordinator, "scheduler", "c")


async def test_trainer_with_another_model_than_the_router_is_refused(
    start: Start, coordinator: Coordinator, tmp_path: Path
) -> None:
    """All kinds have one model; keys that each export writes differently do not count."""
    served = model(tmp_path / "served", transformers_version="5.0")
    start("services.inference", "r", "--role=router", f"--model-path={served}")
    await registered(coordinator, "router", "r")
    again = model(tmp_path / "again", transformers_version="5.1")
    start("services.inference", "r2", "--role=router", f"--model-path={again}")
    await registered(coordinator, "router", "r2")
    other = model(tmp_path / "other", rope_theta=5.0)
    line = await refusal(start("services.trainer", "t", f"--model-path={other}"))
    assert "model config.json = Tiny " in line and "of trainer t" in line and "of router r," in line


async def test_decode_worker_of_another_policy_than_the_trainers_is_refused(
    start: Start, coordinator: Coordinator, tmp_path: Path
) -> None:
    """It would wait for weights that no trainer publishes."""
    agreed = {"agreed": json.dumps({"/policy": "default"})}
    entry = await coordinator.register("trainer", "t", "127.0.0.1:1", metadata=agreed)
    path = model(tmp_path / "model")
    flags = ("--role=decode", f"--model-path={path}", "--policy=other", "--accept-unsigned")
    line = await refusal(start("services.inference", "d", *flags))
    assert "policy = other of decode d" in line and "default of trainer t" in line
    await entry.close()


async def test_changed_setting_can_be_rolled_out_with_the_switch(
    start: Start, coordinator: Coordinator, tmp_path: Path
) -> None:
    """The instance starts and logs the difference."""
    start(ECHO, "a", "--voice=low")
    await registered(coordinator, "echo", "a")
    log = tmp_path / "b.log"
    start(ECHO, "b", "--voice=high", "--accept-differing", "--log-file", str(log))
    await registered(coordinator, "echo", "b")
    warned = [line for line in log_lines(log) if line["event"] == "settings_differ"]
    assert warned and "high of echo b" in warned[0]["error"]


async def test_dead_instance_counts_until_its_lease_ends(
    start: Start, coordinator: Coordinator
) -> None:
    """After kill -9 its entry stays for some seconds; the new instance waits for that."""
    first = start(ECHO, "a", "--voice=low")
    await registered(coordinator, "echo", "a")
    first.kill()
    start(ECHO, "b", "--voice=high")
    await registered(coordinator, "echo", "b")


async def test_starting_instance_yields_to_one_that_registers(
    start: Start, coordinator: Coordinator, tmp_path: Path
) -> None:
    """A standby trainer, or a worker without weights: neither is in the directory."""
    log = tmp_path / "a.log"
    waits = start(ECHO, "a", "--voice=low", "--no-becomes-ready", "--log-file", str(log))
    await until(
        lambda: log.exists() and "waiting_to_be_ready" in [line["event"] for line in log_lines(log)]
    )
    start(ECHO, "b", "--voice=high")
    await registered(coordinator, "echo", "b")
    assert "low of echo a differs from high of echo b" in await refusal(waits)


async def test_higher_id_of_two_simultaneous_registrations_ends(coordinator: Coordinator) -> None:
    """Each finds the other after its own registration: one ends at once, one waits for that."""
    agreements, entries = {}, {}
    for name, voice in (("a", "low"), ("b", "high")):
        config = EchoConfig(instance_id=name, voice=voice, lease_ttl_s=60)
        agreements[name] = Agreement(coordinator, config, kind="echo")
        entries[name] = await coordinator.register(
            "echo", name, "127.0.0.1:1", metadata=agreements[name].metadata
        )
    with pytest.raises(ConfigError, match="high of echo b differs from low of echo a"):
        await agreements["b"].check(registered=True)
    await entries["b"].close()
    await agreements["a"].check(registered=True)
    await entries["a"].close()
