"""Evaluation beside a real trainer's steps: real scheduler, pool and etcd, killed on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from forge.runtime.coordination import Coordinator
from forge.runtime.security.credentials import Security
from forge.v1 import common_pb2, inference_pb2, inference_pb2_grpc, trainer_pb2
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import SchedulerCluster, assert_counts_balance, make_task
from tests.support.trainer.process import TrainerClient, TrainerProcess

pytestmark = pytest.mark.timeout(900)

HELD_OUT = [{"payload": {"q": 1}, "domain": "qa", "group_size": 2}]


class Router(inference_pb2_grpc.InferenceServiceServicer):
    """Says that every worker serves whatever was published."""

    async def GetInferenceStatus(self, request: Any, context: Any) -> Any:
        return inference_pb2.GetInferenceStatusResponse(weight_version=10**6)


@pytest_asyncio.fixture
async def router(etcd: EtcdServer, cluster: str, forge: SchedulerCluster) -> AsyncIterator[None]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Router(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    coordinator = await Coordinator.connect(
        etcd.endpoint, cluster=cluster, signatures=Security(forge.keyring)
    )
    registered = await coordinator.register("router", "router-0", address, metadata={}, ttl_s=30.0)
    yield
    await registered.close()
    await coordinator.close()
    await server.stop(None)


@pytest_asyncio.fixture
async def trainer(
    tmp_path: Path, etcd: EtcdServer, cluster: str, forge: SchedulerCluster, router: None
) -> AsyncIterator[TrainerProcess]:
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(one) + "\n" for one in HELD_OUT))
    process = TrainerProcess(tmp_path, etcd=etcd, cluster=cluster, key_file=tmp_path / "key")
    yield process
    process.kill()


@pytest.mark.faults
async def test_evaluations_survive_a_killed_trainer_and_a_killed_scheduler(
    tmp_path: Path, forge: SchedulerCluster, coordinator: Coordinator, trainer: TrainerProcess
) -> None:
    """Each step's is sampled once and reported once, in the metrics file; none of its rollouts is
    trained, and steps continue independent of it."""
    client = TrainerClient(coordinator, forge.channels)
    settings = {
        "max_steps": 3,
        "checkpoint__every_steps": 2,
        "evaluation__tasks": tmp_path / "held_out.jsonl",
        "evaluation__every_steps": 1,
    }
    scheduler = forge.start_scheduler(queue={"batch_groups": "1"})
    await forge.submit([make_task(f"task-{n}", size=2) for n in range(3)])
    await forge.complete(4)
    trainer.start(**settings)

    async def in_flight() -> bool:
        status = await client.status()
        return status.checkpoint_step == 2 and (await forge.status()).eval_pending == 1

    # Two steps, and the evaluation of the first waits for somebody to sample it.
    await until(in_flight)
    trainer.kill()
    trainer.start(**settings)

    async def followed() -> bool:
        return (await client.status()).phase == trainer_pb2.TRAINER_PHASE_WAITING

    await until(followed)
    await forge.kill(scheduler)
    forge.start_scheduler(queue={"batch_groups": "1"})

    async def sample(step: int, *, reward: float) -> None:
        async def begun() -> bool:
            return (await forge.status()).eval_pending == 1

        async def told() -> bool:
            return (await client.status()).latest_evaluation.step == step

        await until(begun)
        await forge.complete(2, reward=reward)
        await until(told)

    await sample(1, reward=0.5)
    # That of the second step was not begun before the kill; its weights are still the newest.
    await sample(2, reward=0.25)
    await forge.complete(2)
    await client.until_step(3)
    await sample(3, reward=1.0)

    lines = [json.loads(line) for line in trainer.metrics_file.read_text().splitlines()]
    evaluations = [line["evaluation"] for line in lines if "evaluation" in line]
    assert [(one["step"], one["mean_reward"]) for one in evaluations] == [
        (1, 0.5),
        (2, 0.25),
        (3, 1.0),
    ]
    assert all(one["rollouts"] == 2 and not one["failed"] for one in evaluations)
    assert evaluations[2]["domains"]["qa"]["solved_share"] == 1.0
    groups = await forge.groups()
    held_out = [one.group for one in groups if one.group.task.purpose == common_pb2.PURPOSE_EVAL]
    assert {one.task.tag for one in held_out} == {one["tag"] for one in evaluations}
    assert len(held_out) == 3
    assert {one.state for one in held_out} == {common_pb2.GROUP_STATE_EVALUATED}
    status = await forge.status()
    assert status.trained == 3 and status.eval_pending == 0
    assert_counts_balance(status)
    assert trainer.terminate() == 0


@pytest.mark.faults
async def test_repeated_step_is_evaluated_again(
    tmp_path: Path, forge: SchedulerCluster, coordinator: Coordinator, trainer: TrainerProcess
) -> None:
    """Killed before a checkpoint: its new weights differ, and are published as another version."""
    client = TrainerClient(coordinator, forge.channels)
    settings = {"evaluation__tasks": tmp_path / "held_out.jsonl", "evaluation__every_steps": 1}
    forge.start_scheduler(queue={"batch_groups": "1"})
    await forge.submit([make_task("task", size=2)])
    await forge.complete(2)

    async def told() -> list[str]:
        await forge.complete(2)

        async def evaluated() -> bool:
            status = await client.status()
            return status.step == status.latest_evaluation.step == 1

        await until(evaluated)
        lines = [json.loads(line) for line in trainer.metrics_file.read_text().splitlines()]
        return [line["evaluation"]["tag"] for line in lines if "evaluation" in line]

    trainer.start(**settings)
    (first,) = await told()
    trainer.kill()
    trainer.start(**settings)
    (again,) = await told()
    assert first != again
    assert {one.group.task.tag for one in await forge.groups()} == {"", first, again}
    assert trainer.terminate() == 0


async def test_stop_does_not_wait_for_an_evaluation(
    tmp_path: Path, forge: SchedulerCluster, trainer: TrainerProcess
) -> None:
    """SIGTERM during one that no runner samples: exit code 0, and one line with its tag."""
    forge.start_scheduler(queue={"batch_groups": "1"})
    trainer.start(evaluation__tasks=tmp_path / "held_out.jsonl", evaluation__at_start="true")

    async def in_flight() -> bool:
        return (await forge.status()).eval_pending == 1

    await until(in_flight)
    assert await asyncio.to_thread(trainer.terminate) == 0
    (group,) = await forge.groups()
    (left,) = trainer.logged("evaluation_left_running")
    assert (left["step"], left["tag"]) == (0, group.group.task.tag)


async def test_invalid_evaluation_task_is_one_line(tmp_path: Path, trainer: TrainerProcess) -> None:
    """At the start, with file, line and field."""
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"payload": {}, "domain": "qa"}\n{"payload": {}, "domain": 3}\n')
    trainer.start(evaluation__tasks=wrong, evaluation__every_steps=1)
    code, stderr = trainer.wait()
    assert code == 2
    assert stderr.count("\n") == 1
    assert f"{wrong}, line 2: domain must be a text, not 3" in stderr
