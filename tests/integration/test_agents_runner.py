"""The runner as a process, between a real scheduler, pool and gateway; the model is scripted."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import pytest_asyncio

from examples.custom_domain import Dice
from forge.cli.connection import Connection
from forge.cli.deploy.host.drain import drain_instance
from forge.cli.status.system_state import read_state
from forge.core.errors import NotFound
from forge.core.trajectory import parse_trajectory_id
from forge.runtime.coordination import Coordinator
from forge.runtime.security.tokens import Keyring
from forge.v1 import common_pb2, scheduler_pb2
from tests.support.agents.runners import Cluster, cluster_on
from tests.support.gateway.stack import START_S, GatewayStack, recorded
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.log_lines import log_lines
from tests.support.runtime.service_process import ServiceProcess
from tests.support.runtime.waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT_LEASES = pytest.mark.parametrize(
    "own_system", [("--queue.rollout-lease-s=3",)], indirect=True
)
"""What a killed runner held is free soon; elsewhere no runner is so slow as to lose its claims."""
REWARDED = "--reward-functions=manners=tests.support.agents.tasks:polite"
CRASHING = "crashing=tests.support.agents.reward_functions:crashes"


@pytest.fixture(scope="module")
def scheduled_stack(stack: GatewayStack) -> GatewayStack:
    """The file's stack with a scheduler that repeats a failed attempt once."""
    stack.start_scheduler("scheduler", "--queue.max-attempts=2")
    return stack


@pytest_asyncio.fixture
async def system(
    scheduled_stack: GatewayStack, own_coordinator: Coordinator, cluster: str
) -> AsyncIterator[Cluster]:
    """For a test at the end of whose work no rollout runs."""
    async with cluster_on(scheduled_stack, own_coordinator, cluster) as made:
        yield made


@pytest_asyncio.fixture
async def own_system(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    etcd: EtcdServer,
    cluster: str,
    coordinator: Coordinator,
) -> AsyncIterator[Cluster]:
    """For a test that leaves rollouts behind, with a scheduler of the settings given."""
    stack = GatewayStack(folder=tmp_path, etcd=etcd, cluster=cluster)
    stack.start()
    stack.start_scheduler("scheduler", *getattr(request, "param", ()))
    async with cluster_on(stack, coordinator, cluster) as made:
        yield made
        for runner in made.runners:
            runner.kill()
    stack.stop()


def task(
    name: str, *, scaffold: str = "blackbox", domain: str = "manners", size: int = 2, **payload: Any
) -> common_pb2.Task:
    payload = {"prompt": "Please SAY[[thanks]]", "wanted": "thanks"} | payload
    return common_pb2.Task(
        task_id=name,
        domain=domain,
        scaffold=scaffold,
        payload_json=json.dumps(payload),
        group_size=size,
        purpose=common_pb2.PURPOSE_EVAL,
    )


def outcomes(group: scheduler_pb2.BatchGroup) -> list[float]:
    return [
        reward.value
        for trajectory in group.trajectories
        for reward in trajectory.rewards
        if reward.kind == common_pb2.REWARD_KIND_OUTCOME
    ]


async def started(runner: ServiceProcess, word: str, count: int) -> list[psutil.Process]:
    """The processes of a runner, once so many have this first word."""

    def found() -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            there = psutil.Process(runner.pid).children(recursive=True)
            # Without words between a fork and its exec.
            names = [Path(first).name for each in there for first in each.cmdline()[:1]]
            if sum(word in name for name in names) >= count:
                return there
        return []

    return await until(found)


async def test_every_scaffold_completes_a_group(system: Cluster) -> None:
    """Black box and white box: leased, sampled, scored, sealed, found again by tag."""
    system.start_runner(REWARDED)
    groups = await system.ended(
        task("black"),
        task("white", scaffold="whitebox"),
        task("rude", wanted="thank you"),
    )
    assert outcomes(groups["black"]) == outcomes(groups["white"]) == [1.0, 1.0]
    assert outcomes(groups["rude"]) == [0.0, 0.0]
    assert all(t.turns == 1 for group in groups.values() for t in group.trajectories)
    (result,) = await system.operator.results(system.tag)
    assert (result.domain, result.rollouts, result.failed) == ("manners", 6, 0)
    assert result.mean_outcome == pytest.approx(4 / 6)


async def test_runner_with_only_a_token_completes_a_group(system: Cluster, tmp_path: Path) -> None:
    """As on a host without the key: it verifies no directory entry, and others need none of its
    own. An operator drains it over the scheduler, and resumes it."""
    token, stack = tmp_path / "token", system.stack
    at = ("--etcd", stack.etcd.endpoint, "--cluster", stack.cluster)
    issue = ("token", "issue", "runner", "--subject", "host", "--out", str(token))
    argv = [sys.executable, "-m", "forge.cli.main", *issue, *at, "--key-file", str(stack.key_file)]
    subprocess.run(argv, check=True, capture_output=True, timeout=START_S)
    runner = system.start_runner(REWARDED, "--key-file=", f"--token-file={token}")
    groups = await system.ended(task("with-token"), task("white-token", scaffold="whitebox"))
    assert outcomes(groups["with-token"]) == outcomes(groups["white-token"]) == [1.0, 1.0]
    name = system.runner_name()
    system_at = Connection(etcd=stack.etcd.endpoint, cluster=stack.cluster, key_file=stack.key_file)
    drained = await drain_instance(system_at, name, resume=False, wait_s=START_S)
    assert drained == f"{name}: drained, 0 rollouts still run"
    await stack.logged(name, '"event": "drain_begun"')
    shown = await read_state(system.coordinator, system.channels, cluster=stack.cluster)
    assert [one.metadata["draining"] for one in shown.services if one.instance == name] == ["1"]
    await system.submit(task("waits"))
    await stack.logged("scheduler", '"event": "runner_drained"')
    assert (await system.operator.scheduler_status()).running_rollouts == 0
    resumed = await drain_instance(system_at, name, resume=True, wait_s=0.0)
    assert resumed == f"{name}: gets rollouts again"
    groups = await system.ended_of("with-token", "white-token", "waits")
    assert outcomes(groups["waits"]) == [1.0, 1.0] and runner.poll() is None


async def test_any_program_is_an_agent(system: Cluster, tmp_path: Path) -> None:
    """`--command` runs a program that uses the OpenAI SDK. A crashed attempt is repeated: the
    program succeeds the second time, the reward function never, and its group is tombstoned."""
    tmp_path.chmod(0o777)
    ran = f"{tmp_path}/{{task_id}}"
    crash_once = (
        f"test -e {ran} || {{ touch {ran}; echo no luck >&2; exit 3; }}; "
        f'exec {sys.executable} {EXAMPLES / "black_box.py"} "$0"'
    )
    command = f"--command=sh -c '{crash_once}' {{prompt}}"
    system.start_runner(f"{REWARDED},{CRASHING}", f"--command-write={tmp_path}", command)
    groups = await system.ended(
        task("program", size=1), task("unscored", domain="crashing", size=1)
    )
    assert outcomes(groups["program"]) == [1.0]
    reason = groups["unscored"].group.reason
    assert "reward_functions:crashes: its process was killed by SIGSEGV" in reason
    logged = log_lines(system.stack.log_of(system.runner_name()))
    failed = {event["task_id"]: event for event in logged if event["event"] == "program_failed"}
    assert failed.keys() == groups.keys()
    assert (failed["program"]["returncode"], failed["program"]["stderr"]) == (3, ["no luck"])


async def test_program_that_manages_its_context_is_recorded(
    system: Cluster, own_coordinator: Coordinator
) -> None:
    """The white-box example folds twice and answers: five turns, each recorded. A program is timed
    like any agent: each turn has its predecessor, and its tools and its end have their time."""
    command = f"--command={sys.executable} {EXAMPLES / 'white_box.py'}"
    system.start_runner(REWARDED, command)
    groups = await system.ended(task("folding", size=1))
    assert outcomes(groups["folding"]) == [1.0]
    (summary,) = groups["folding"].trajectories
    assert summary.turns == 5
    found = await recorded(system.stack, own_coordinator, summary.trajectory_id)
    assert [turn.turns_before for turn in found.turns] == list(range(5))
    assert all(turn.timings.agent_s > 0 for turn in found.turns[1:])
    assert found.closing_agent_s > 0


async def test_custom_domain_needs_one_setting(system: Cluster) -> None:
    """The example's domain and its reward function, each named on the command line."""
    system.start_runner(
        "--domains=dice=examples.custom_domain:Dice",
        "--reward-functions=short=examples.custom_domain:brevity",
    )
    payload = Dice().generate(Random(0))
    groups = await system.ended(
        task("dice", domain="dice", size=1, **payload),
        task("short", domain="short", size=1, prompt="SAY[[four words in all]]"),
    )
    assert outcomes(groups["dice"]) == [0.0]
    assert outcomes(groups["short"]) == [0.25]


async def test_impossible_task_is_tombstoned_at_once(system: Cluster) -> None:
    """A task that its domain refuses is tombstoned with the reason; one of an undeclared domain or
    scaffold waits (`test_scheduler_abilities.py`)."""
    system.start_runner(REWARDED)
    groups = await system.ended(task("payload", prompt=None))
    assert "payload 'prompt'" in groups["payload"].group.reason


@pytest.mark.faults
async def test_hung_agent_is_attempted_again_then_tombstoned(system: Cluster) -> None:
    """The time limit frees the runner; after the last attempt the group has the reason."""
    system.start_runner(REWARDED, "--rollout-timeout-s=1", "--command=sleep 600")
    groups = await system.ended(task("sleeper", size=1))
    assert groups["sleeper"].group.state == common_pb2.GROUP_STATE_TOMBSTONED
    assert "no end within 1 s" in groups["sleeper"].group.reason


@SHORT_LEASES
@pytest.mark.faults
async def test_another_runner_completes_the_work_of_a_killed_one(own_system: Cluster) -> None:
    """kill -9 of a runner in the middle of its rollouts loses no task, and ends its processes."""
    first = own_system.start_runner(REWARDED, "--command=sleep 600")
    tasks = [task(f"t{number}", size=1) for number in range(4)]
    ending = asyncio.create_task(own_system.ended(*tasks))
    await own_system.running(4)
    processes = await started(first, "sleep", 4)
    first.kill()
    own_system.start_runner(REWARDED)
    groups = await ending
    assert [outcomes(group) for group in groups.values()] == [[1.0]] * 4
    assert psutil.wait_procs(processes, timeout=START_S)[1] == []


@SHORT_LEASES
@pytest.mark.faults
async def test_agent_that_blocks_the_event_loop_keeps_its_claim(
    own_system: Cluster, tmp_path: Path
) -> None:
    """It blocks its runner for longer than a lease, and its first attempt counts."""
    began, go_on = tmp_path / "began", tmp_path / "go-on"
    domain = "--domains=blocking=tests.support.agents.tasks:BlockingDomain"
    own_system.start_runner(domain, "--concurrency=1")
    blocked = task("blocked", size=1, domain="blocking", began=str(began), until=str(go_on))
    ending = asyncio.create_task(own_system.ended(blocked))
    await until(began.exists)
    # This runner leases later and renews nothing: a lease has passed since the block began, once
    # the scheduler ends this claim.
    dead = own_system.start_runner(REWARDED, "--concurrency=1", "--command=sleep 600")
    silent = task("silent", size=1)
    silent.tag = "other"
    await own_system.submit(silent)
    await own_system.running(2)
    dead.kill()
    await own_system.stack.logged("scheduler", '"event": "rollout_failed"')
    go_on.touch()
    groups = await ending
    assert outcomes(groups["blocked"]) == [1.0]
    lines = log_lines(own_system.stack.log_of("scheduler"))
    failed = [line["trajectory_id"] for line in lines if line["event"] == "rollout_failed"]
    assert {parse_trajectory_id(each).task_id for each in failed} == {"silent"}


@pytest.mark.faults
async def test_running_rollouts_pass_to_the_next_leader_at_once(own_system: Cluster) -> None:
    """kill -9 of the leader long before a claim is due for renewal: the next leader, which leases
    nothing meanwhile, gets the renewals all the same. It keeps the drain of the runner, and counts
    its rollouts."""
    own_system.stack.processes["scheduler"].terminate()
    leader = own_system.stack.start_scheduler("first", "--queue.rollout-lease-s=600")
    own_system.start_runner(REWARDED, "--command=sleep 600")
    await own_system.submit(task("sleeper", size=2))
    await own_system.running(2)
    name = own_system.runner_name()

    async def drained_with_two() -> bool:
        try:
            return await own_system.operator.set_runner_draining(name, True) == 2
        except NotFound:
            # A runner leases while it registers.
            return False

    await until(drained_with_two)
    own_system.stack.start_scheduler(
        "second", "--queue.rollout-lease-s=600", "--takeover-hold-s=600"
    )
    leader.kill()
    await own_system.running(2)
    (drained,) = (await own_system.operator.scheduler_status()).draining_runners
    assert (drained.runner_id, drained.running) == (name, 2)


async def test_sigterm_lets_running_rollouts_end(system: Cluster, tmp_path: Path) -> None:
    """A stopped runner finishes its rollouts, reports them and exits with 0."""
    tmp_path.chmod(0o755)
    go_on = tmp_path / "go-on"
    program = f'{sys.executable} {EXAMPLES / "black_box.py"} "$0"'
    held = f"until test -e {go_on}; do sleep 0.05; done; exec {program}"
    command = f"--command=sh -c '{held}' {{prompt}}"
    runner = system.start_runner(
        REWARDED, f"--drain-s={START_S}", f"--command-read={tmp_path}", command
    )
    ending = asyncio.create_task(system.ended(task("slow", size=1)))
    await system.running(1)
    runner.terminate()
    await system.stack.logged(system.runner_name(), '"event": "draining"')
    go_on.touch()
    groups = await ending
    _, errors = await asyncio.to_thread(runner.communicate, timeout=START_S)
    assert (runner.returncode, errors) == (0, "")
    assert outcomes(groups["slow"]) == [1.0]


async def test_key_of_another_cluster_is_one_line(system: Cluster) -> None:
    """A runner with another key accepts no entry of the cluster, and exits with 2 and the
    reason."""
    key = system.stack.folder / "another-key"
    Keyring.generate(key)
    runner = system.start_runner(REWARDED, f"--key-file={key}", "--lease-wait-s=0.1")
    _, errors = await asyncio.to_thread(runner.communicate, timeout=START_S)
    assert runner.returncode == 2
    assert errors == (
        "forge runner: no scheduler instance in cluster 'test-agents-runner' has a valid entry "
        "(the token was not signed by this cluster's key): compare key_file with theirs\n"
    )


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("--reward-functions=manners=tests.support.agents.tasks:rude", "tasks has no rude"),
        ("--command=no-such-program", "there is no program 'no-such-program'"),
        ("--concurrency=0", "concurrency = '0' is not allowed"),
    ],
)
def test_wrong_runner_setting_is_one_line(stack: GatewayStack, setting: str, said: str) -> None:
    """Exit code 2 and the reason, before any lease."""
    argv = [sys.executable, "-m", "forge.agents", "--etcd", stack.etcd.endpoint]
    key_file = str(stack.folder / "pool" / "key")
    ended = subprocess.run(
        [*argv, "--cluster", stack.cluster, "--key-file", key_file, setting],
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    (*_, last) = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert last.startswith("forge runner: ")
    assert said in last
