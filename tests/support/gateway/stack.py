"""Real processes around a gateway: a pool, a scripted engine, and gateways to talk to or kill."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anthropic import AsyncAnthropic
from anthropic import DefaultAsyncHttpxClient as AnthropicHttpxClient
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from forge.client.sessions.session import AgentSession
from forge.core.errors import Unauthenticated
from forge.core.token_columns import int32_bytes
from forge.core.trajectory import TokenTree
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2
from tests.support.gateway.chat_templates import save_model
from tests.support.gateway.scripted_engine import start_scripted_engine
from tests.support.pool.process import PoolClient, PoolProcess
from tests.support.pool.records import recorded_tree
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.secure_etcd import SecureEtcd
from tests.support.runtime.service_process import ServiceProcess, start_service
from tests.support.runtime.waiting import until

# A process takes seconds to start, and minutes where others take the processor.
START_S = 120.0
SHARD = "s0"


@dataclass(kw_only=True)
class GatewayStack:
    """One pool, any number of engines and gateways, in a cluster of their own."""

    folder: Path
    etcd: EtcdServer
    cluster: str
    family: str = "chatml"
    context_tokens: int = 4096
    secure: SecureEtcd | None = None
    """In place of `etcd`: every process has its own user."""
    pool: PoolProcess = field(init=False)
    processes: dict[str, ServiceProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = PoolProcess(
            self.folder / "pool", etcd=self.etcd, cluster=self.cluster, shard=SHARD
        )
        self.model_path = self.folder / "model"
        self.model_path.mkdir(parents=True)
        save_model(self.family, self.model_path, context_tokens=self.context_tokens)
        self.requests_file = self.folder / "requests.jsonl"

    def start(self) -> None:
        self.pool.start(*self._access("pool"))
        self.start_engine("engine-0")
        self.start_gateway("gateway-0")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Started in here; its processes end with the block."""
        try:
            self.start()
            yield
        finally:
            self.stop()

    def start_engine(self, name: str, *settings: str) -> None:
        self.processes[name] = start_scripted_engine(
            *self._with_model(name),
            *("--requests-file", str(self.requests_file)),
            *self._access("inference"),
            *settings,
        )

    def start_gateway(self, name: str, *settings: str) -> None:
        argv = [*self._with_model(name), "--calls.retry-for-s", str(START_S)]
        argv += [*self._access("gateway"), *settings]
        self.processes[name] = start_service("services.gateway", *argv)

    def start_scheduler(self, name: str, *settings: str) -> ServiceProcess:
        """One that repeats failed attempts at once."""
        argv = [*self.shared(name), "--queue.retry-backoff-s", "0.05"]
        argv += [*self._access("scheduler"), *settings]
        self.processes[name] = start_service("services.scheduler", *argv)
        return self.processes[name]

    def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        for name in list(self.processes):
            self.kill(name)
        self.pool.kill()

    def log_of(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    async def logged(self, name: str, text: str, *, times: int = 1) -> None:
        """Returns once the log of a process has a text so often."""
        await until(lambda: self.log_of(name).read_text().count(text) >= times)

    async def gateway(self, coordinator: Coordinator, name: str = "gateway-0") -> Instance:
        """The registered instance; waits for it, and for an engine and the pool."""
        for kind in ("pool", "router"):
            await coordinator.discover(kind).wait(timeout_s=START_S)
        (instance,) = await coordinator.discover("gateway").wait(
            timeout_s=START_S, where=lambda found: found.instance_id == name
        )
        return instance

    async def gone(self, coordinator: Coordinator, kind: str, name: str) -> None:
        """As when the TTL of an instance that was killed has passed; on return it is not found."""
        await self.etcd.end_leases(self.cluster, name)
        discovery = coordinator.discover(kind)
        while any(found.instance_id == name for found in discovery.instances):
            await discovery.changed()

    def token(self, trajectory_id: str, **changes: Any) -> str:
        """A session token for a trajectory, as the scheduler would sign it."""
        fields: dict[str, Any] = {
            "subject": trajectory_id,
            "scopes": frozenset({"session"}),
            "trajectory_id": trajectory_id,
            "task_id": trajectory_id.partition(":")[0],
            "domain": "code",
            "pool_shard": SHARD,
        }
        return self.pool.keyring.sign(Claims(**(fields | changes)))

    def grader_token(self, trajectory_id: str, **changes: Any) -> str:
        """The token for the rewards of a trajectory, as the scheduler would sign it."""
        return self.token(trajectory_id, scopes=frozenset({"grader"}), **changes)

    def openai(self, instance: Instance, token: str, *, max_retries: int = 0) -> AsyncOpenAI:
        """The unmodified SDK, told a base URL and a key."""
        return AsyncOpenAI(
            base_url=f"http://{instance.metadata['http']}/v1",
            api_key=token,
            max_retries=max_retries,
            http_client=DefaultAsyncHttpxClient(trust_env=False),
        )

    def anthropic(self, instance: Instance, token: str, *, max_retries: int = 0) -> AsyncAnthropic:
        """Anthropic's unmodified SDK, told the same."""
        return AsyncAnthropic(
            base_url=f"http://{instance.metadata['http']}",
            api_key=token,
            max_retries=max_retries,
            http_client=AnthropicHttpxClient(trust_env=False),
        )

    def agent(self, instance: Instance, token: str) -> AgentSession:
        """The white-box client of a harness that grades by itself: with the grader token, too."""
        try:
            claims = self.pool.keyring.verify(token, now_s=0.0)
        except Unauthenticated:
            grader = token
        else:
            grader = self.pool.keyring.sign(replace(claims, scopes=frozenset({"grader"})))
        return AgentSession.connect(
            instance.address, token, grader_token=grader, owns_rollout=False
        )

    async def pool_client(self, coordinator: Coordinator) -> PoolClient:
        return await PoolClient.connect(self.pool, coordinator)

    def sampled(self, trajectory_id: str) -> list[dict[str, Any]]:
        """What the engine was asked in a session and what it sampled, in order."""
        lines = self.requests_file.read_text().splitlines()
        requests = [json.loads(line) for line in lines]
        return [request for request in requests if request["session_id"] == trajectory_id]

    @property
    def key_file(self) -> Path:
        return self.folder / "pool" / "key"

    def shared(self, name: str) -> list[str]:
        """The settings that every process of the cluster has."""
        return [
            *("--etcd", self.etcd.endpoint, "--cluster", self.cluster, "--instance-id", name),
            *("--key-file", str(self.key_file), "--lease-ttl-s", "2"),
            *("--log-file", str(self.log_of(name))),
        ]

    def _access(self, service: str) -> list[str]:
        return self.secure.options(service) if self.secure else []

    def _with_model(self, name: str) -> list[str]:
        return [
            *self.shared(name),
            *("--model-path", str(self.model_path), "--log-level", "debug"),
        ]


async def recorded(
    stack: GatewayStack, coordinator: Coordinator, trajectory_id: str
) -> common_pb2.Trajectory:
    """A trajectory as the trainer would read it."""
    client = await stack.pool_client(coordinator)
    (trajectory,) = await client.fetch(trajectory_id)
    await client.close()
    return trajectory


def token_tree(trajectory: common_pb2.Trajectory) -> TokenTree:
    return recorded_tree(trajectory.turns)


def check_exact(stack: GatewayStack, trajectory: common_pb2.Trajectory, *, lost: int = 0) -> None:
    """What is on record is what the engine was sent and what it sampled, bit for bit; but for
    `lost` samples of gateways that were killed meanwhile."""
    tree = token_tree(trajectory)
    policy = [turn for turn in trajectory.turns if not turn.HasField("other_model")]
    on_record = Counter((tree.context(turn.turn_index), turn.sampled.ids) for turn in policy)
    asked = Counter(
        (int32_bytes(one["prompt_ids"]), int32_bytes(one["sampled_ids"]))
        for one in stack.sampled(trajectory.trajectory_id)
    )
    assert not on_record - asked
    assert (asked - on_record).total() == lost


async def closed(
    stack: GatewayStack, coordinator: Coordinator, gateway: Instance, trajectory_id: str
) -> common_pb2.Trajectory:
    """The trajectory, sealed, and checked against what the engine saw."""
    async with stack.agent(gateway, stack.token(trajectory_id)) as agent:
        await agent.close()
    trajectory = await recorded(stack, coordinator, trajectory_id)
    check_exact(stack, trajectory)
    return trajectory
