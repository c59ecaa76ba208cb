"""Everything between an agent and a trainer, as processes of their own on loopback: etcd, a pool,
a scheduler, a gateway, and the mock upstream instead of inference."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.cpu import cpu_s
from benchmarks.support.gateway.mock_upstream import MockConfig, Scripts
from benchmarks.support.processes import ended, started
from benchmarks.support.scheduler.cluster import scheduler_cluster
from forge.runtime.rpc.remote import Remote
from forge.v1.pool_pb2_grpc import PoolServiceStub
from services.gateway.model.chat_model import ChatModel
from tests.support.gateway.chat_templates import save_model
from tests.support.scheduler.cluster import START_S, SchedulerCluster

CLUSTER = "middleware"
LEASE_S = "60"
"""Long, since a process that the load starves is not dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Middleware:
    """The running processes, and how they are spoken to."""

    cluster: SchedulerCluster
    """As runner and trainer."""
    pools: Remote[PoolServiceStub]
    chat_url: str
    close_url: str
    answer: str
    """The upstream's, to everything."""
    pids: dict[str, int]

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds that each of them has used so far."""
        return {name: cpu_s(pid) for name, pid in self.pids.items()}


@asynccontextmanager
async def start_middleware(
    folder: Path, *, concurrency: int, batch_groups: int
) -> AsyncIterator[Middleware]:
    """All of it, serving. `concurrency` is N, in groups; W is 0.3 N."""
    async with AsyncExitStack() as undo:
        etcd, cluster = await undo.enter_async_context(scheduler_cluster(folder, CLUSTER))
        coordinator = cluster.coordinator
        pool = cluster.start_pool()
        scheduler = cluster.start_scheduler(
            queue={
                "concurrency": str(concurrency),
                "window": str(max(1, round(0.3 * concurrency))),
                "batch_groups": str(batch_groups),
            },
            lease_ttl_s=LEASE_S,
            pool_timeout_s="30",
        )
        model = folder / "model"
        model.mkdir()
        save_model("chatml", model, context_tokens=1 << 15)
        common = [
            *("--model-path", str(model), "--etcd", etcd.endpoint, "--cluster", CLUSTER),
            *("--key-file", str(folder / "key"), "--lease-ttl-s", LEASE_S),
        ]
        upstream = started("benchmarks.support.gateway.mock_upstream", folder, common)
        undo.callback(ended, upstream)
        gateway = started("services.gateway", folder, common)
        undo.callback(ended, gateway)
        await coordinator.discover("router").wait(timeout_s=START_S)
        (instance,) = await coordinator.discover("gateway").wait(timeout_s=START_S)
        base = f"http://{instance.metadata['http']}"
        yield Middleware(
            cluster=cluster,
            pools=Remote(coordinator, cluster.channels, kind="pool", stub=PoolServiceStub),
            chat_url=f"{base}/v1/chat/completions",
            close_url=f"{base}/v1/forge/close",
            answer=Scripts(ChatModel.load(str(model)), MockConfig()).choose(0)[0].text,
            pids={
                "gateway": gateway.pid,
                "pool": pool.pid,
                "scheduler": scheduler.process.pid,
                "etcd": etcd.pid,
            },
        )
