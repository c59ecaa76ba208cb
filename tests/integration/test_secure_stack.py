"""Every service with an etcd of mutual TLS and authentication, each as its own user."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge.client.operator import Operator
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.channel import Channels
from forge.runtime.security.credentials import Security
from forge.v1 import common_pb2
from tests.support.gateway.chat_templates import make_tokenizer
from tests.support.gateway.stack import START_S, GatewayStack
from tests.support.rl.models import SHAPE
from tests.support.runtime.command import run_command
from tests.support.runtime.secure_etcd import SecureEtcd
from tests.support.runtime.service_process import ServiceProcess, start_service
from tests.support.trainer.process import TrainerClient, TrainerProcess

pytestmark = pytest.mark.timeout(900)
HOST = "h1"
"""Of the runner."""


class SecureStack:
    """One process of each kind."""

    def __init__(self, folder: Path, *, cluster: str) -> None:
        self.folder = folder
        self.secure = SecureEtcd(folder / "secure", cluster=cluster)
        self.stack = GatewayStack(
            folder=folder, etcd=self.secure.server, cluster=cluster, secure=self.secure
        )
        save_weights(self.stack.model_path)
        self.trainer = TrainerProcess(
            folder,
            etcd=self.secure.server,
            cluster=cluster,
            key_file=self.stack.key_file,
            access=self.secure.options("trainer"),
        )
        self.runner: ServiceProcess | None = None

    async def start(self) -> None:
        await asyncio.to_thread(self.secure.server.start)
        await self.secure.apply(runners=[HOST])
        self.stack.start()
        self.stack.start_scheduler("scheduler", "--queue.batch-groups=1")
        self.trainer.start(max_steps=2)

    async def issue_runner_token(self) -> Path:
        """By the command of deploy/README.md, as the admin."""
        token = self.folder / "agents-token"
        words = ["token", "issue", "runner", "--subject", HOST, "--out", str(token)]
        words += ["--key-file", str(self.stack.key_file), *self.secure.options("admin")]
        ended = await run_command(*words)
        assert ended.returncode == 0, ended.stderr
        return token

    def start_runner(self, token: Path) -> None:
        """With its token, its host's user in etcd and no key."""
        argv = ["run", *self.secure.options(f"runner@{HOST}"), "--token-file", str(token)]
        argv += ["--instance-id", f"agents-{HOST}-0", "--lease-ttl-s", "2"]
        argv += ["--reward-functions=manners=tests.support.agents.tasks:polite"]
        argv += ["--log-file", str(self.stack.log_of("runner"))]
        self.runner = start_service("forge.agents", *argv, stderr=subprocess.PIPE)

    def stop(self) -> None:
        for process in (self.runner, self.trainer):
            if process is not None:
                process.kill()
        self.stack.stop()
        self.secure.server.stop()


def save_weights(directory: Path) -> None:
    """A tiny model for the tokenizer in the directory."""
    tokenizer = make_tokenizer("chatml")
    torch.manual_seed(0)
    shape = SHAPE | {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=8))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id]
    model.save_pretrained(directory)


@pytest_asyncio.fixture
async def stack(tmp_path: Path, cluster: str) -> AsyncIterator[SecureStack]:
    made = SecureStack(tmp_path, cluster=cluster)
    await made.start()
    yield made
    made.stop()


async def connected(stack: SecureStack) -> tuple[Coordinator, Channels]:
    """As an operator."""
    tls = stack.secure.tls
    security = Security(
        stack.stack.pool.keyring,
        subject="test",
        tls_cert=tls.cert,
        tls_key=tls.key,
        tls_ca=tls.ca,
    )
    coordinator = await stack.secure.connect("operator", signatures=security)
    return coordinator, Channels(security)


async def test_a_stack_with_one_etcd_user_a_service_trains_two_steps(stack: SecureStack) -> None:
    """Pool, scheduler, inference, gateway and trainer with their own passwords, and a runner with a
    token alone; every listener has TLS."""
    token = await stack.issue_runner_token()
    coordinator, channels = await connected(stack)
    await stack.stack.gateway(coordinator)
    stack.start_runner(token)
    operator = Operator(coordinator, channels, retry_for_s=START_S)
    await operator.submit(
        common_pb2.Task(
            task_id=f"task-{number}",
            domain="manners",
            scaffold="blackbox",
            group_size=2,
            payload_json='{"prompt": "Please SAY[[thanks]]", "wanted": "thanks"}',
        )
        for number in range(2)
    )
    trained = await TrainerClient(coordinator, channels).until_step(2)
    assert trained.step == 2
    status = await operator.scheduler_status()
    assert (status.accepted, status.trained) == (2, 2)
    names = {found.kind: found.instance_id for found in await coordinator.all_instances()}
    assert names["runner"] == f"agents-{HOST}-0"
    assert {"pool", "scheduler", "router", "gateway", "trainer"} <= names.keys()
    await channels.close()
    await coordinator.close()
