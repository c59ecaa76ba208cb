"""Agents that are more than one conversation: a coding agent at work, and a team in one session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge.client.operator import Operator
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.rpc.channel import Channels
from forge.runtime.security.credentials import Security
from forge.v1 import common_pb2, scheduler_pb2
from tests.support.clients import coding_job
from tests.support.clients.matrix import Row
from tests.support.clients.old_wording import old_wording
from tests.support.clients.programs import (
    PROGRAMS_DIR,
    STEPS,
    VENV,
    Client,
    argv_of,
    check_linear,
    context_text,
    environment,
    look_call,
    run_program,
    sealed,
)
from tests.support.gateway.script import scripted
from tests.support.gateway.stack import GatewayStack, check_exact, recorded, token_tree
from tests.support.runtime.waiting import until

RETRY_S = 240.0
OVERFLOW_TOKENS, OVERFLOW_LINES = 8000, 1200
"""A context, and the lines of a tool's results: it holds one result, not two."""
IN_PATH = [
    Client(name="openai", program="openai_chat.py", protocol="chat", stream=True),
    Client(name="anthropic", program="anthropic_messages.py", protocol="messages", stream=True),
]
MINI = Row(client="mini-swe-agent", protocol="chat", stream=False)
TEAM = Row(client="openai-agents, sub-agents", protocol="chat", stream=False)


def in_path_row(client: Client) -> Row:
    return replace(client.row, client=f"{client.name}, session in the URL")


SETTINGS = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""Of mini-swe-agent."""


@pytest.fixture
def runner(stack: GatewayStack, tmp_path: Path) -> Iterator[None]:
    """A scheduler, and a runner whose agent is mini-swe-agent as its package installs it."""
    shared = [
        *("--etcd", stack.etcd.endpoint, "--cluster", stack.cluster),
        *("--key-file", str(stack.folder / "pool" / "key")),
    ]
    mini = (
        f"{VENV / 'bin/mini'} --model openai/policy --yolo --exit-immediately "
        f"--output {tmp_path / 'mini.json'} --task {{prompt}}"
    )
    env = os.environ | SETTINGS | {"HOME": str(tmp_path)}
    written = (f"--command-write={tmp_path}", f"--reward-read={tmp_path}")
    reward = "--reward-functions=repair=tests.support.clients.coding_job:repaired"
    passed = f"--pass-environment={','.join(SETTINGS)}"
    argv = [sys.executable, "-m", "forge.agents", *shared, reward, passed, *written]
    argv.append(f"--command={mini}")
    stack.processes["scheduler"] = subprocess.Popen(
        [sys.executable, "-m", "services.scheduler", *shared], text=True
    )
    process = subprocess.Popen(argv, env=env)
    yield
    process.kill()
    process.wait()
    stack.kill("scheduler")


async def ended(
    stack: GatewayStack, coordinator: Coordinator, task: common_pb2.Task
) -> scheduler_pb2.BatchGroup:
    """Submits an evaluation task and waits until it is evaluated or given up."""
    over = (common_pb2.GROUP_STATE_EVALUATED, common_pb2.GROUP_STATE_TOMBSTONED)
    channels = Channels(Security(stack.pool.keyring, subject="test"))
    operator = Operator(coordinator, channels, retry_for_s=RETRY_S)
    try:
        await operator.submit([task])

        async def ended() -> scheduler_pb2.BatchGroup | None:
            groups = [group async for group in operator.groups(task.tag)]
            return next((group for group in groups if group.group.state in over), None)

        return await until(ended)
    finally:
        await channels.close()


async def test_coding_agent_solves_its_task_and_is_rewarded(
    stack: GatewayStack,
    gateway: Instance,
    clients_coordinator: Coordinator,
    runner: None,
    matrix: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """mini-swe-agent repairs a program with bash: four turns, linear, exact, scored by the file."""
    matrix(MINI, version=_version("mini-swe-agent"))
    folder = tmp_path / "job"
    folder.mkdir()
    coding_job.prepare(folder)
    for path in (tmp_path, *tmp_path.rglob("*")):
        # The sandbox of a root runner has another user.
        path.chmod(path.stat().st_mode | 0o666 | 0o111 * path.is_dir())
    task = common_pb2.Task(
        task_id="repair",
        domain="repair",
        scaffold="blackbox",
        payload_json=json.dumps(coding_job.task(folder)),
        group_size=1,
        purpose=common_pb2.PURPOSE_EVAL,
        tag="clients",
    )
    group = await ended(stack, clients_coordinator, task)
    assert group.group.state == common_pb2.GROUP_STATE_EVALUATED, group.group.reason
    assert (folder / "result.txt").read_text() == "add adds\n"
    (summary,) = group.trajectories
    outcome = common_pb2.REWARD_KIND_OUTCOME
    assert [reward.value for reward in summary.rewards if reward.kind == outcome] == [1.0]
    trajectory = await recorded(stack, clients_coordinator, summary.trajectory_id)
    check_exact(stack, trajectory)
    assert len(trajectory.turns) == 4
    check_linear(trajectory)
    assert "AssertionError" in context_text(stack, trajectory, 3)


async def test_parallel_sub_agents_are_one_trajectory(
    stack: GatewayStack,
    gateway: Instance,
    clients_coordinator: Coordinator,
    matrix: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """A leader and two helpers, called in parallel with one key: each continues only itself."""
    row = matrix(TEAM)
    trajectory_id = "team:0:0"
    send = '<tool_call>\n{{"name":"send","arguments":{{"input":"{0}"}}}}\n</tool_call>'
    told = [
        scripted("Send them.", f"{send.format('Go.')}\n{send.format('Run.')}", STEPS[-1]),
        scripted("You help.", look_call("door"), "It is locked."),
    ]
    argv = [str(VENV / "bin/python"), str(PROGRAMS_DIR / "agents_sdk_team.py"), *told]
    token = stack.token(trajectory_id)
    report = await run_program(argv, environment(gateway, token, tmp_path, in_path=False))
    row.version = report.version
    assert report.answer == STEPS[-1]
    trajectory = await sealed(stack, gateway, clients_coordinator, trajectory_id)
    contexts = [context_text(stack, trajectory, turn) for turn in range(len(trajectory.turns))]
    helped = [turn for turn, text in enumerate(contexts) if "You help." in text]
    assert (len(contexts), len(helped)) == (6, 4)
    lengths = token_tree(trajectory).lengths
    continued = [
        turn.parent_turn
        for turn in trajectory.turns
        if turn.parent_turn >= 0 and turn.prefix_tokens == lengths[turn.parent_turn]
    ]
    assert len(set(continued)) == len(continued) == 3


@pytest.mark.parametrize("wording", ["new", "old"])
async def test_strands_folds_its_history_only_when_told_of_an_overflow_in_its_words(
    wording: str,
    stack: GatewayStack,
    gateway: Instance,
    clients_coordinator: Coordinator,
    tmp_path: Path,
) -> None:
    """LiteLLM below it knows an overflow by its words alone. With those that the gateway had
    before, the agent ends without having done its job."""
    trajectory_id = f"strands-{wording}:0:0"
    coding_job.prepare(tmp_path)
    token = stack.token(trajectory_id, context_tokens=OVERFLOW_TOKENS)
    steps = [shell(f"cat {tmp_path}/calc.py; seq 1 {OVERFLOW_LINES}")] * 2
    repair = shell(f"sed -i 's/a - b/a + b/' {tmp_path}/calc.py")
    told = scripted("Make calc.py add.", *steps, after_fold=("", repair, STEPS[-1]))
    argv = [str(VENV / "bin/python"), str(PROGRAMS_DIR / "strands_agent.py"), told, "shell"]
    env = environment(gateway, token, tmp_path, in_path=False)
    if wording == "old":
        async with old_wording(f"http://{gateway.metadata['http']}") as proxy:
            with pytest.raises(AssertionError, match="the messages take"):
                await run_program(argv, env | {"OPENAI_BASE_URL": f"{proxy}/v1"})
    else:
        report = await run_program(argv, env)
        assert report.answer == STEPS[-1]
    done = (tmp_path / "calc.py").read_text() == coding_job.REPAIRED
    assert done == (wording == "new")
    trajectory = await sealed(stack, gateway, clients_coordinator, trajectory_id)
    assert len(trajectory.turns) == (5 if wording == "new" else 2)


@pytest.mark.parametrize("client", IN_PATH, ids=lambda client: client.key)
async def test_base_url_is_enough_for_a_client(
    client: Client,
    stack: GatewayStack,
    gateway: Instance,
    clients_coordinator: Coordinator,
    matrix: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """With the session in the path, the client's key is ignored."""
    row = matrix(in_path_row(client))
    trajectory_id = f"path-{client.key}:0:0"
    env = environment(gateway, stack.token(trajectory_id), tmp_path, in_path=True)
    report = await run_program(argv_of(client), env)
    row.version = report.version
    assert report.answer == STEPS[-1]
    trajectory = await sealed(stack, gateway, clients_coordinator, trajectory_id)
    assert len(trajectory.turns) == len(STEPS)
    check_linear(trajectory)


def shell(command: str) -> str:
    call = json.dumps({"name": "shell", "arguments": {"command": command}})
    return f"<tool_call>\n{call}\n</tool_call>"


def _version(package: str) -> str:
    """Of a package in the clients' environment."""
    (metadata,) = VENV.glob(f"lib/python*/site-packages/{package.replace('-', '_')}-*.dist-info")
    return metadata.name.removesuffix(".dist-info").rpartition("-")[2]
