"""A real trainer between a real scheduler, pool and etcd, killed and cut off on the way."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from forge.client.stored.token_values import TokenValuesReader, TurnValues
from forge.client.weights import WeightSteering, earlier_version
from forge.core.errors import FailedPrecondition, NotFound
from forge.core.named_tensor import NamedTensor
from forge.runtime.coordination import Coordinator
from forge.runtime.weights import TensorEntry, content_digest
from forge.v1 import trainer_pb2
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import assert_counts_balance, make_task
from tests.support.trainer.process import START_S
from tests.support.trainer.stack import GROUPS_PER_STEP, Stack, trainer_stack, until_finished

pytestmark = pytest.mark.timeout(900)
stack = trainer_stack


async def test_run_trains_every_batch_and_finishes(stack: Stack, coordinator: Coordinator) -> None:
    """Steps are committed, reported, published, checkpointed; then weights and the values of single
    tokens are still served, the latter after a restart, too."""
    stack.trainer.start(max_steps=3, checkpoint__every_steps=2)
    await stack.feed(0, 3 * GROUPS_PER_STEP)
    last = await stack.client.until_step(3)

    assert last.groups == GROUPS_PER_STEP and last.trajectories == 2 * GROUPS_PER_STEP
    assert last.trained_tokens == 2 * last.trajectories
    assert last.sample_tokens == 5 * last.trajectories and last.tree_tokens == 5
    assert 0 < last.mean_reward <= 1 and dict(last.reward_by_domain) == {"code": last.mean_reward}
    code = last.domains["code"]
    assert (code.trajectories, code.trained_tokens) == (last.trajectories, last.trained_tokens)
    assert code.gradient_share == 1.0 and code.entropy == pytest.approx(last.entropy)
    assert stack.trainer.recorded_steps() == [1, 2, 3]
    assert sorted((await stack.trained()).values()) == [1, 1, 2, 2, 3, 3]
    assert_counts_balance(await stack.cluster.status())

    status = await until_finished(stack.client)
    assert (status.step, status.max_steps, status.checkpoint_step) == (3, 3, 3)
    assert [path.name for path in sorted(stack.trainer.checkpoints.iterdir())] == [
        "latest",
        "run-clock.json",
        "step-00000002",
        "step-00000003",
        "token-values",
        "weight-version",
    ]
    # The last step's weights are version 4, the kept model read back from its files version 5.
    manifest = await stack.client.until_version(5)
    assert manifest["weight_version"] == status.weight_version == 5
    entries = await fetched_entries(stack, manifest["source"], 5)
    assert content_digest(entries) == manifest["digest"]
    with pytest.raises(NotFound, match="held: \\[4, 5\\]"):
        await stack.client.fetch(manifest["source"], 1)
    reader = TokenValuesReader(coordinator, stack.cluster.channels)
    before = await values_of_all(stack, reader)
    assert sorted(one.step for one in before.values()) == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    with pytest.raises(NotFound, match="no token values of task-9:0:0"):
        await reader.read("task-9:0:0")
    await a_damaged_checkpoint_is_passed_over(stack)
    after = await values_of_all(stack, reader)
    # Step 3 was trained again, from the same weights under a new version.
    again = {
        name for name, one in after.items() if one.weight_version != before[name].weight_version
    }
    assert again == {name for name, one in before.items() if one.step == 3}
    same = {name: replace(one, weight_version=0) for name, one in before.items()}
    assert {name: replace(one, weight_version=0) for name, one in after.items()} == same


async def values_of_all(stack: Stack, reader: TokenValuesReader) -> dict[str, TurnValues]:
    """The values of the one turn of every trajectory."""
    found = {}
    for task_id in await stack.trained():
        for rollout in (0, 1):
            (turn,) = (await reader.read(f"{task_id}:{rollout}:0")).items()
            found[f"{task_id}:{rollout}:0"] = turn[1]
            assert turn[0] == 0 and len(turn[1].flags) == len(turn[1].entropies) == 2
            assert min(turn[1].entropies) > 0
    return found


async def fetched_entries(stack: Stack, source: str, version: int) -> list[TensorEntry]:
    """What a worker gets, as its manifest describes it."""
    return [
        TensorEntry.of(
            NamedTensor(name=one.name, dtype=one.dtype, shape=tuple(one.shape), data=one.data)
        )
        for one in await stack.client.fetch(source, version)
    ]


async def a_damaged_checkpoint_is_passed_over(stack: Stack) -> None:
    """The older one is restored, the damaged one kept for whoever looks into it."""
    stack.trainer.kill()
    damaged = stack.trainer.checkpoints / "step-00000003" / "learner.pt"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    stack.trainer.start(max_steps=3, checkpoint__every_steps=2)
    status = await until_finished(stack.client)
    assert status.step == 3
    assert stack.trainer.logged("rewound")[-1]["step"] == 2
    assert (stack.trainer.checkpoints / "step-00000003.damaged").is_dir()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.faults
async def test_killed_trainer_continues_from_its_checkpoint(
    stack: Stack, coordinator: Coordinator, ranks: int
) -> None:
    """After kill -9 only the steps after the checkpoint are trained again; no rank is left behind.
    The loss is a custom one, which every rank finds. A held version is still held, and sent."""
    loss = "examples.custom_loss:sapo"
    settings = {
        "max_steps": 5,
        "checkpoint__every_steps": 2,
        "ranks": ranks,
        "objective__algorithm": loss,
    }
    stack.trainer.start(**settings)
    await stack.feed(0, 3 * GROUPS_PER_STEP)
    await stack.client.until_step(3)

    async def saved() -> bool:
        return (await stack.client.status()).checkpoint_step == 2

    await until(saved)
    before = await stack.trained()
    steering = WeightSteering(coordinator, stack.cluster.channels, retry_for_s=START_S)
    held = await hold_an_earlier_version(stack, steering)
    assert stack.trainer.process is not None
    children = psutil.Process(stack.trainer.process.pid).children(recursive=True)
    assert len(children) >= ranks - 1
    stack.trainer.kill()
    _, left = await asyncio.to_thread(psutil.wait_procs, children, START_S)
    assert not left
    stack.trainer.start(**settings)
    await stack.feed(3 * GROUPS_PER_STEP, 2 * GROUPS_PER_STEP)
    status = await until_finished(stack.client)

    after = await stack.trained()
    assert status.step == 5
    assert sorted(after.values()) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert {task: step for task, step in after.items() if step <= 2} == {
        task: step for task, step in before.items() if step <= 2
    }
    assert stack.trainer.recorded_steps() == [1, 2, 3, 4, 5]
    # Start, three steps; the restored weights, three steps, the kept model: no version is used
    # twice.
    assert status.weight_version == 9
    assert_counts_balance(await stack.cluster.status())
    assert status.held_weight_version == held.weight_version == 3
    await promote_the_newest_version(stack, steering, held)


async def hold_an_earlier_version(
    stack: Stack, steering: WeightSteering
) -> trainer_pb2.PublishedWeights:
    """The version before the newest, which is on disk then."""
    listing = await steering.listing()
    assert [one.weight_version for one in listing.versions] == [3, 4]
    held = listing.versions[0]
    assert held.step == 2 and not held.on_disk and not listing.workers
    hold = await steering.roll_back(earlier_version(listing))
    assert hold.base_version == 3 and hold.subject
    with pytest.raises(FailedPrecondition, match="0 workers decode"):
        await steering.start_canary(4, share=0.5)
    (audited,) = [line for line in stack.trainer.logged("audit") if line["code"] == "OK"]
    assert audited["method"].endswith("/RollBackWeights")
    assert audited["targets"] == {"weight_version": 3}
    return held


async def promote_the_newest_version(
    stack: Stack, steering: WeightSteering, held: trainer_pb2.PublishedWeights
) -> None:
    """The restarted trainer sends the held version bit for bit, until it is promoted."""
    listing = await steering.listing()
    assert [one.weight_version for one in listing.versions] == [3, 8, 9]
    assert listing.versions[0].on_disk and listing.versions[0].digest == held.digest
    source = (await stack.client.until_version(9))["source"]
    entries = await fetched_entries(stack, source, 3)
    assert content_digest(entries) == held.digest
    assert (stack.trainer.checkpoints / "held").is_dir()
    assert not (await steering.promote()).base_version
    assert not (stack.trainer.checkpoints / "held").exists()
    with pytest.raises(NotFound):
        await steering.roll_back(3)


async def test_requested_checkpoint_and_stop_lose_no_step(stack: Stack) -> None:
    """One is saved on request and with SIGTERM; the next start continues from that step, here with
    sequence ratios."""
    stack.trainer.start(checkpoint__every_steps=100, objective__algorithm="gspo")
    await stack.feed(0, GROUPS_PER_STEP)
    await stack.client.until_step(1)
    saved = await stack.client.save()
    again = await stack.client.save()
    assert saved.step == again.step == 1 and saved.path == again.path
    names = {path.name for path in Path(saved.path).iterdir()}
    assert {"config.json", "model.safetensors", "learner.pt", "state.json"} <= names
    assert stack.trainer.terminate() == 0
    stack.trainer.start(checkpoint__every_steps=100, objective__algorithm="gspo")
    await stack.feed(GROUPS_PER_STEP, GROUPS_PER_STEP)
    metrics = await stack.client.until_step(2, after=1)
    assert metrics.step == 2
    assert stack.trainer.logged("rewound")[-1]["step"] == 1


@pytest.mark.faults
async def test_training_survives_the_loss_of_scheduler_and_pool(stack: Stack) -> None:
    """Both killed in mid-run and started again: the trainer, here with a critic, waits and
    continues."""
    board = stack.trainer.checkpoints.parent / "board"
    stack.trainer.start(max_steps=2, objective__algorithm="ppo", tensorboard_dir=board)
    await stack.feed(0, GROUPS_PER_STEP)
    first = await stack.client.until_step(1)
    assert first.value_loss > 0
    await stack.cluster.kill(stack.cluster.schedulers[0])
    await stack.cluster.kill(stack.cluster.pools["s0"])
    stack.cluster.start_pool()
    stack.cluster.start_scheduler(queue={"batch_groups": str(GROUPS_PER_STEP)})
    await stack.feed(GROUPS_PER_STEP, GROUPS_PER_STEP)
    await until_finished(stack.client)
    assert sorted((await stack.trained()).values()) == [1, 1, 2, 2]
    assert_counts_balance(await stack.cluster.status())
    assert stack.trainer.terminate() == 0 and any(board.iterdir())


@pytest.mark.faults
async def test_sigterm_waits_for_no_dead_scheduler(stack: Stack) -> None:
    """A trainer that waits for a killed scheduler ends in good order."""
    (scheduler,) = stack.cluster.schedulers
    await stack.cluster.kill(scheduler)
    stack.trainer.start()

    async def loads() -> bool:
        return (await stack.client.status()).phase == trainer_pb2.TRAINER_PHASE_LOADING

    await until(loads)
    assert await asyncio.to_thread(stack.trainer.terminate) == 0
    assert stack.trainer.logged("stopped")


async def test_id_outside_the_vocabulary_ends_no_step(stack: Stack) -> None:
    """The batch is trained without the trajectory that has it, and the log names both."""
    stack.trainer.start(max_steps=1)
    await stack.cluster.submit([make_task(f"task-{n}", size=2) for n in range(GROUPS_PER_STEP)])
    leases = await stack.cluster.lease(2 * GROUPS_PER_STEP)
    for number, lease in enumerate(leases):
        sampled = (4, 5) if number else (4, 10**6)
        await stack.cluster.seal(lease, reward=float(number % 3 > 0), sampled=sampled)
    await stack.cluster.finish(leases)
    last = await stack.client.until_step(1)
    assert last.trajectories == 2 * GROUPS_PER_STEP - 1
    (excluded,) = stack.trainer.logged("trajectory_excluded")
    assert excluded["trajectory_id"] == leases[0].trajectory_id
    assert "turn 0 has token 1000000; the vocabulary is 0 to " in excluded["error"]


async def test_unknown_model_is_one_line(stack: Stack) -> None:
    """Exit code 2, with setting and value."""
    stack.trainer.start(model_path="/nowhere/at-all")
    code, stderr = stack.trainer.wait()
    assert code == 2
    assert stderr.count("\n") == 1
    assert "model_path = '/nowhere/at-all'" in stderr
