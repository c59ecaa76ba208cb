"""kill -9 of each role of inference in the middle of a run, with drafts and with the KV store.

The load: rollouts of the run, and sessions of the test, whose answers are compared with the record.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from forge.cli.connection import of_run
from forge.client.stored.pool import PoolReader
from forge.core.token_columns import float32_bytes, int32_array, int32_bytes
from forge.v1 import common_pb2, pool_pb2
from services.inference.engines.kv_store.block_file import read_block
from tests.support.suite.forge_run import LIMIT_S, ForgeRun, still_alive
from tests.support.suite.recorded_logprobs import (
    KEEP_ALL,
    directories_of_versions,
    worst_logprob,
)
from tests.support.suite.run_metrics import Work, work_of_services
from tests.support.suite.run_probes import SESSIONS, TURNS, Probes, probing

pytestmark = pytest.mark.timeout(1800)

KILLS = 2
MORE = 3
"""Steps that are taken after the kills."""
HEADS = 2
BLOCK_TOKENS = 16
"""Of the store: prompts of the tiny model have hundreds."""
STORE_MIB = 16
"""Little, for evictions in all runs."""
CACHE_MIB = 1
"""Little, for reads of the store: otherwise the prefix cache has most blocks."""
TOLERANCE = 1e-3
"""Of a log-prob, nats. Two versions in a row differ by more than a hundred times as much."""
LEAST_COMPARED = 50
"""Turns."""
LEAST_DRAFTS = 10
"""Accepted since a kill."""


def with_drafts_and_store(folder: Path, root: Path, *, decode_role: str) -> ForgeRun:
    """A run that takes more steps than the test waits for."""
    settings = KEEP_ALL | {
        "trainer.mtp.heads": HEADS,
        "trainer.mtp.learning_rate": 3e-3,
        "decode.role": decode_role,
        "decode.speculation.adaptive": "false",
        "router.router.early_hand_off_tokens": 64,
        "router.router.local_prefill_tokens": 64,
        # A worker that starts beside other work takes longer than the default.
        "router.router.worker_wait_s": 300,
        "gateway.calls.retry_for_s": 300,
        "scheduler.queue.concurrency": 16,
        "scheduler.queue.batch_groups": 4,
    }
    for worker in ("prefill", "decode"):
        settings[f"{worker}.kv.store_dir"] = folder / "store"
        settings[f"{worker}.kv.store_block_tokens"] = BLOCK_TOKENS
        settings[f"{worker}.kv.store_mib"] = STORE_MIB
        settings[f"{worker}.kv.cache_mib"] = CACHE_MIB
    extra = tuple(f"--set={key}={value}" for key, value in settings.items())
    return ForgeRun(folder / "run", root=root, steps=1000, extra=extra)


async def until(run: ForgeRun, what: str, condition: Callable[[dict[str, Work]], bool]) -> None:
    """Wait for counts of the services."""
    give_up_s = time.monotonic() + LIMIT_S
    while not condition(await work_of_services(run)):
        assert run.process.poll() is None and time.monotonic() < give_up_s, (
            f"no {what}:\n{run.explain()}"
        )
        # Real time: a look takes time of the services.
        await asyncio.sleep(0.5)


def total(now: dict[str, Work], before: dict[str, Work]) -> Work:
    """Return the work of all processes since an earlier look."""
    gained = [work.since(before.get(name)) for name, work in now.items()]
    return Work(
        started_s=0.0,
        accepted=sum(work.accepted for work in gained),
        found=sum(work.found for work in gained),
        damaged=sum(work.damaged for work in gained),
        repeated=sum(work.repeated for work in gained),
    )


def drafts_and_store_work(now: dict[str, Work], before: dict[str, Work]) -> bool:
    """Whether drafts were accepted, and blocks found, since an earlier look."""
    gained = total(now, before)
    return gained.accepted >= LEAST_DRAFTS and gained.found > 0


async def kill(run: ForgeRun, victims: Sequence[str], probes: Probes) -> None:
    """Kill processes that have requests, and wait until their successors and all others work."""
    before, answered = await work_of_services(run), probes.turns
    said = [f"{victim} crashed (SIGKILL)" for victim in victims]
    lines = list(map(run.output().count, said))
    for victim in victims:
        run.kill(victim)
    await asyncio.to_thread(
        run.wait_until,
        lambda: all(run.output().count(one) > n for one, n in zip(said, lines, strict=True)),
        "word of the kill",
    )

    def works(now: dict[str, Work]) -> bool:
        return (
            all(one in now and now[one].started_s > before[one].started_s for one in victims)
            and total(now, before).repeated > 0
            and drafts_and_store_work(now, before)
            # Of sessions that have begun since.
            and probes.turns > answered + SESSIONS * TURNS
        )

    await until(run, f"work after the kill of {victims}", works)
    assert total(await work_of_services(run), {}).damaged == 0


@pytest.mark.parametrize(
    ("victims", "decode_role"),
    [
        pytest.param(["prefill"], "decode", id="prefill"),
        pytest.param(["decode"], "decode", id="decode"),
        pytest.param(["decode"], "both", id="both"),
        pytest.param(["router"], "decode", id="router"),
        pytest.param(["router", "prefill", "decode"], "both", id="all"),
    ],
)
async def test_kill_of_a_role_loses_nothing(
    victims: list[str], decode_role: str, tmp_path: Path, forge_root: Path
) -> None:
    """Training continues, each request is answered, the record is whole and exact, drafts and store
    work before and after, and no process is left."""
    run = with_drafts_and_store(tmp_path, forge_root, decode_role=decode_role)
    run.start()
    await asyncio.to_thread(run.wait_for_step, 2)
    async with probing(run) as probes:
        await until(run, "drafts and blocks", lambda now: drafts_and_store_work(now, {}))
        for _ in range(KILLS):
            await kill(run, victims, probes)
        await asyncio.to_thread(run.wait_for_step, run.last_step() + MORE)
    trajectories = await recorded(run)
    pids = run.stack_pids()
    assert await asyncio.to_thread(run.interrupt) == 130, run.explain()
    assert still_alive(pids) == []

    check_answers(probes, trajectories)
    check_versions(trajectories, published(run))
    check_logprobs(trajectories, run)
    check_store(tmp_path / "store")
    check_training(run)


async def recorded(run: ForgeRun) -> dict[str, common_pb2.Trajectory]:
    """Return all trajectories of the pool; none may be damaged."""
    found: dict[str, common_pb2.Trajectory] = {}
    async with of_run(run.directory).open() as (coordinator, channels):
        pool = PoolReader(coordinator, channels)
        async for page in pool.query(pool_pb2.TrajectoryFilter()):
            assert not page.damaged
            ids = [each.trajectory_id for each in page.trajectories]
            async for trajectory in pool.fetch(page.shard, ids, on_damage=pytest.fail):
                found[trajectory.trajectory_id] = trajectory
    return found


def check_answers(probes: Probes, trajectories: dict[str, common_pb2.Trajectory]) -> None:
    """Each answer that a session got is on record, bit for bit, and nothing else."""
    assert probes.sealed
    states = {trajectories[name].state for name in probes.sealed}
    assert states == {common_pb2.TRAJECTORY_STATE_SEALED}
    for name, answers in probes.answers.items():
        turns = [turn.sampled for turn in trajectories[name].turns]
        assert len(turns) == len(answers)
        for answer in answers:
            kept = turns[answer.turn_index]
            assert kept.ids == int32_bytes(answer.ids)
            assert kept.logprobs == float32_bytes(answer.logprobs)
            assert kept.weight_versions == int32_bytes(answer.weight_versions)


def published(run: ForgeRun) -> set[int]:
    """Versions that the trainer has published."""
    log = (run.directory / "logs" / "trainer.log").read_text(errors="replace")
    lines = [json.loads(line) for line in log.splitlines() if '"weights_published"' in line]
    return {line["weight_version"] for line in lines}


def check_versions(trajectories: dict[str, common_pb2.Trajectory], known: set[int]) -> None:
    """Each token has a published version, and those of an answer do not fall."""
    seen: set[int] = set()
    for trajectory in trajectories.values():
        for turn in trajectory.turns:
            versions = int32_array(turn.sampled.weight_versions)
            assert len(versions) == len(int32_array(turn.sampled.ids))
            assert all(earlier <= later for earlier, later in pairwise(versions))
            seen.update(versions)
    assert len(seen) > MORE and seen <= known, (seen, known)


def check_logprobs(trajectories: dict[str, common_pb2.Trajectory], run: ForgeRun) -> None:
    """They are those of the recorded version: no answer read keys and values of another one, or of
    other tokens."""
    versions = directories_of_versions(run.directory / "checkpoints")
    worst, compared = worst_logprob(trajectories.values(), versions)
    assert compared >= LEAST_COMPARED and worst < TOLERANCE, (worst, compared)


def check_store(store: Path) -> None:
    """Each file in it is a whole block under its own name."""
    blocks = [path for path in store.glob("*/*/*") if path.is_file()]
    assert blocks
    for path in blocks:
        identity, chain = bytes.fromhex(path.parents[1].name), bytes.fromhex(path.name)
        assert read_block(path, identity=identity, chain=chain) is not None


def check_training(run: ForgeRun) -> None:
    """Each step is taken once, and no group is given up."""
    steps = run.metrics()
    numbers = [int(step["step"]) for step in steps]
    assert numbers == list(range(1, len(steps) + 1))
    log = (run.directory / "logs" / "scheduler.log").read_text(errors="replace")
    assert "group_tombstoned" not in log
