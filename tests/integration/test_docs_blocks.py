"""The blocks of the README, docs/agents.md and docs/rewards.md, run against real processes.

What a block leaves open (host, key, connection, prompt) is filled in; nothing else is changed. The
model is scripted: it answers what stands in SAY[[...]].
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from examples.custom_domain import Dice
from forge.client.operator import Operator
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.channel import Channels
from forge.runtime.security.credentials import Security
from forge.v1 import common_pb2
from tests.support.gateway.stack import START_S, GatewayStack, recorded
from tests.support.runtime.etcd import EtcdServer
from tests.support.suite.doc_blocks import ROOT, Block, blocks

pytestmark = pytest.mark.commands

QUICK_START, OPENAI = blocks("README.md")
_FIRST_AGENT = 7
"""Blocks that tests/e2e/test_e2e_first_agent.py runs."""
RUNNER, PROGRAM, ANTHROPIC, AGENTS_SDK, FOLD, DOMAIN, REWARD, OPERATOR = blocks("docs/agents.md")[
    _FIRST_AGENT:
]
GRADE, _REWARD, HARNESS = blocks("docs/rewards.md")
assert _REWARD == REWARD
GRADED = "--reward-functions trivia=my_rewards:grade"
"""Has each answer scored by the page's own reward function."""
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Docs:
    """A stack without a runner: the blocks start that."""

    stack: GatewayStack
    coordinator: Coordinator
    operator: Operator
    folder: Path
    """Holds the page's `my_rewards.py`."""

    @property
    def connection(self) -> str:
        stack = self.stack
        return f"--etcd {stack.etcd.endpoint} --cluster {stack.cluster} --key-file {stack.key_file}"

    @contextmanager
    def running(
        self, command: str, *, cwd: Path | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """`forge agents run ...` in a shell until the end of the block; it must stop by itself."""
        filled = (
            command.strip()
            .replace("HOST:2379", self.stack.etcd.endpoint)
            .replace("KEY", str(self.stack.key_file))
            .replace("...", self.connection)
        )
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{self.folder}",
            "FORGE_CLUSTER": self.stack.cluster,
            "FORGE_LOG_FILE": str(self.folder / "runner.log"),
        }
        runner = subprocess.Popen(
            ["sh", "-c", f"exec {filled}"], cwd=cwd or self.folder, env=environment
        )
        try:
            yield runner
            runner.terminate()
            assert runner.wait(timeout=START_S) == 0
        finally:
            runner.kill()
            runner.wait()

    async def score(self, runner: subprocess.Popen[bytes], domain: str, **payload: Any) -> float:
        """Mean outcome of one task of its own, once the runner has brought it to its end."""

        async def still_running(_ended: int) -> None:
            assert runner.poll() is None, (self.folder / "runner.log").read_text()

        task = make_task(domain, **payload)
        await self.operator.submit([task])
        (result,) = await self.operator.all_ended(
            task.tag, groups=1, poll_s=0.1, on_look=still_running
        )
        assert result.failed == 0
        return result.mean_outcome

    async def answer_of(self, program: Block | str) -> float:
        """Score of an agent that is a Python program: 1 when its last line is the answer."""
        file = self.folder / "agent.py"
        file.write_text(program if isinstance(program, str) else program.text)
        command = shlex.quote(f"{sys.executable} {file}")
        with self.running(f"forge agents run {GRADED} --command {command} ...") as runner:
            return await self.score(
                runner, "trivia", prompt="Say SAY[[a blue door]]", expected="a blue door"
            )


def make_task(domain: str, **payload: Any) -> common_pb2.Task:
    """An evaluation of one rollout with a tag of its own."""
    tag = f"docs-{next(_NUMBERS)}"
    return common_pb2.Task(
        task_id=tag,
        domain=domain,
        scaffold="blackbox",
        payload_json=json.dumps(payload),
        group_size=1,
        purpose=common_pb2.PURPOSE_EVAL,
        tag=tag,
    )


def compiled(block: Block) -> CodeType:
    """A block that awaits at its top level, as a notebook would run it."""
    code = compile(block.text, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(code, CodeType)
    return code


@pytest_asyncio.fixture(scope="module")
async def docs(
    shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Docs]:
    folder = tmp_path_factory.mktemp("docs")
    stack = GatewayStack(folder=folder / "stack", etcd=shared_etcd, cluster="docs")
    stack.start()
    stack.start_scheduler("scheduler")
    (folder / "my_rewards.py").write_text(GRADE.text)
    coordinator = await Coordinator.connect(shared_etcd.endpoint, cluster=stack.cluster)
    channels = Channels(Security(stack.pool.keyring, subject="test"))
    operator = Operator(coordinator, channels, retry_for_s=START_S)
    await stack.gateway(coordinator)
    yield Docs(stack=stack, coordinator=coordinator, operator=operator, folder=folder)
    await operator.close()
    stack.stop()


def test_quick_start_names_existing_make_targets() -> None:
    """And `make run` starts the run of the end-to-end tests."""
    outside_make = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    for line in QUICK_START.text.splitlines():
        words = shlex.split(line, comments=True)
        planned = subprocess.run(
            [*words, "--dry-run"],
            cwd=ROOT,
            env=outside_make,
            capture_output=True,
            text=True,
            check=True,
        )
        if words == ["make", "run"]:
            assert planned.stdout.splitlines()[-1] == ".venv/bin/forge run --model tiny --seed 0"


async def test_documented_runner_command_completes_a_task(docs: Docs) -> None:
    """With address and key."""
    with docs.running(f"{RUNNER.text.strip()} {GRADED}") as runner:
        assert await docs.score(runner, "trivia", prompt="SAY[[yes]]", expected="yes") == 1.0


async def test_documented_program_answers_a_prompt(docs: Docs) -> None:
    """`--command` with an example of the repository."""
    command = PROGRAM.text.strip().replace(".venv/bin/python", sys.executable)
    with docs.running(f"{command} {GRADED}", cwd=ROOT) as runner:
        assert await docs.score(runner, "trivia", prompt="SAY[[no]]", expected="no") == 1.0


async def test_documented_openai_program_is_an_agent(docs: Docs) -> None:
    """The README's agent, a file of five lines."""
    assert await docs.answer_of(OPENAI) == 1.0


async def test_documented_anthropic_program_is_an_agent(docs: Docs) -> None:
    """The page's agent for Anthropic's SDK."""
    assert await docs.answer_of(ANTHROPIC) == 1.0


async def test_documented_white_box_folds_its_history(docs: Docs) -> None:
    """Its block, between a task and a last call."""
    program = f"""
import asyncio, json, os
from forge.client import AgentSession

task = json.loads(os.environ["FORGE_TASK_JSON"])["messages"]
context = [*task]
request = {{"role": "user", "content": "Sum up: SAY[[nothing yet]]"}}

async def main():
    global context
{textwrap.indent(FOLD.text, "    ")}
    assert context[-1]["content"] == "Known so far: nothing yet", context
    print("a blue door")

asyncio.run(main())
"""
    assert await docs.answer_of(program) == 1.0


async def test_documented_domain_needs_one_setting(docs: Docs) -> None:
    """Any runner with the domain runs the example's dice."""
    payload = Dice().generate(Random(0))
    with docs.running(DOMAIN.text, cwd=ROOT) as runner:
        assert await docs.score(runner, "dice", **payload) == 0.0


async def test_documented_reward_function_needs_one_setting(docs: Docs) -> None:
    """The page's function compares the answer with the payload."""
    with docs.running(REWARD.text) as runner:
        assert await docs.score(runner, "trivia", prompt="SAY[[four]]", expected="4") == 0.0


async def test_documented_harness_sets_its_own_outcome(docs: Docs) -> None:
    """It samples with one token of the lease and sets the outcome with the other."""
    stack, name = docs.stack, "harness:0:0"
    gateway = await stack.gateway(docs.coordinator)
    lease = SimpleNamespace(session_token=stack.token(name), grader_token=stack.grader_token(name))
    names: dict[str, Any] = {"lease": lease, "address": gateway.address}
    filled = HARNESS.text.replace("2 + 2?", "2 + 2? SAY[[4]]")
    await eval(compiled(Block(language="python", text=filled)), names)
    (outcome,) = (await recorded(stack, docs.coordinator, name)).rewards
    assert (outcome.name, outcome.value) == ("solved", 1.0)


async def test_documented_operator_submits_and_reads_results(
    docs: Docs, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the SDK: the mean outcome of the tag is returned."""
    task = make_task("trivia", prompt="SAY[[four]]", expected="four")
    filled = (
        OPERATOR.text.replace("127.0.0.1:2379", docs.stack.etcd.endpoint)
        .replace('cluster="default"', f'cluster="{docs.stack.cluster}"')
        .replace("/etc/forge/key", str(docs.stack.key_file))
        .replace("eval-before", task.tag)
        .replace("groups=96", "groups=1")
    )
    block = compiled(Block(language="python", text=filled))
    with docs.running(REWARD.text):
        await eval(block, {"tasks": [task]})
    assert "trivia 1.0" in capsys.readouterr().out


def test_agents_sdk_block_of_the_docs_is_valid_python() -> None:
    """`make test-clients`, which has that SDK, runs it."""
    compiled(AGENTS_SDK)
