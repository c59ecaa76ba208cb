"""The order of a training step, and what a failure at each point of it means."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog

from forge.core.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from forge.v1 import trainer_pb2 as pb
from services.trainer.actors.training import Advance, Diverged, SaveCheckpoint
from services.trainer.batches.reading import ReadersLost
from services.trainer.checkpoint.history import Entry
from services.trainer.checkpoint.store import Checkpoint
from services.trainer.published.publisher import Superseded
from tests.support.runtime.waiting import until
from tests.support.trainer.world import (
    Run,
    World,
    run_in,
)


@pytest_asyncio.fixture
async def run() -> AsyncIterator[Run]:
    """Three steps, a checkpoint every second one."""
    world = World()
    world.disk.set()
    async with run_in(world, max_steps=3) as started:
        yield started
        world.disk.set()


RESUME = ["restore", "rewind 0", "publish 0"]


async def test_step_is_committed_before_it_is_published_and_saved(run: Run) -> None:
    """From a fresh start to the end, in exactly this order."""
    assert await run.advance() == RESUME
    assert await run.advance() == ["take", "prepare", "step", "commit 1", "publish 1"]
    assert await run.advance() == ["take", "prepare", "step", "commit 2", "publish 2", "save 2"]
    # Nothing is prepared beyond the last step.
    assert await run.advance() == ["take", "step", "commit 3", "publish 3"]
    assert await run.training.ask(Advance(), timeout_s=30) is False
    # The last publication is of the kept model, read from the checkpoint's files.
    assert run.world.events[-3:] == ["save 3", "publish 3", "release"]
    assert run.world.kept == ["", "", "", "", "/saved"]
    assert run.record.phase == pb.TRAINER_PHASE_FINISHED
    assert (run.record.step, run.record.checkpoint_step, run.record.weight_version) == (3, 3, 5)
    assert run.record.status().oldest_checkpoint_step == 3
    assert await run.advance() == []


async def test_lost_reader_is_told_to_the_learner(run: Run) -> None:
    """Which starts the ranks again, if one is lost; the batch is then read again."""
    await run.advance()
    run.world.faults["take"] = ReadersLost("rank 1")
    with pytest.raises(ReadersLost):
        await run.advance()
    assert run.world.events == ["take fails", "check_readers"]
    assert await run.advance() == ["take", "prepare", "step", "commit 1", "publish 1"]


async def test_log_prob_gap_above_the_alarm_is_one_warning_per_step(run: Run) -> None:
    """With both numbers; a smaller gap is only a metric."""
    await run.advance()
    with structlog.testing.capture_logs() as logged:
        run.world.gap = 0.04
        await run.advance()
        run.world.gap = 0.2
        await run.advance()
    (warning,) = [line for line in logged if line["log_level"] == "warning"]
    assert (warning["event"], warning["step"]) == ("logprob_gap_high", 2)
    assert (warning["gap"], warning["logprob_gap_alarm"]) == (0.2, 0.05)
    assert [step.inference_gap_mean for step in run.record.steps] == [0.04, 0.2]


async def test_out_of_memory_is_one_warning_and_a_metric(run: Run) -> None:
    """The line has step, batch and the new budget."""
    await run.advance()
    run.world.retries = 2
    with structlog.testing.capture_logs() as logged:
        await run.advance()
    (warning,) = [line for line in logged if line["log_level"] == "warning"]
    assert warning["event"] == "token_budget_lowered" and warning["reason"] == "no memory"
    assert (warning["step"], warning["batch_id"], warning["token_budget"]) == (1, "b", 64)
    assert [(one.memory_retries, one.token_budget) for one in run.record.steps] == [(2, 64)]


async def test_evaluator_learns_of_weights_and_their_publication(run: Run) -> None:
    """Of each step once; of the last one when its weights are published for certain."""
    await run.advance(2)
    run.world.faults["publish"] = Unavailable("etcd")
    await run.advance()
    run.world.faults["publish"] = Unavailable("etcd")
    await run.advance(3)
    told = ["resumed", "1 published", "2 not published", "3 published"]
    assert run.world.evaluated == told


async def test_trainer_without_a_batch_waits(run: Run) -> None:
    """And its status says so."""
    await run.advance()
    run.world.batches = 0
    assert await run.advance() == []
    assert run.record.phase == pb.TRAINER_PHASE_WAITING


@pytest.mark.parametrize("error", [NotFound("taken back"), FailedPrecondition("another step")])
async def test_step_that_cannot_be_committed_is_undone(run: Run, error: Exception) -> None:
    """The learner and the scheduler return to the checkpoint; no weights were published."""
    await run.advance(3)
    run.world.faults["commit"] = error
    assert await run.advance() == ["take", "step", "commit 3 fails"]
    assert run.record.step == 2
    assert await run.advance() == ["restore", "rewind 2", "publish 2"]
    assert await run.advance() == ["take", "step", "commit 3", "publish 3"]


async def test_step_commits_its_batch_and_the_refills(run: Run) -> None:
    """All of them before it is published; a skipped step tombstones all of them."""
    run.world.refills = 2
    await run.advance()
    commits = ["commit 1", "commit_refill 1", "commit_refill 1"]
    assert await run.advance() == ["take", "prepare", "step", *commits, "publish 1"]
    run.world.skip = "loss nan"
    assert await run.advance() == ["take", "prepare", "step"] + 3 * [
        "tombstone step 2 skipped: loss nan"
    ]


async def test_step_whose_commits_end_in_the_middle_is_undone(run: Run) -> None:
    """The rewind makes the committed part visible again, and the step is taken once more."""
    run.world.refills = 1
    await run.advance(2)
    run.world.faults["commit_refill"] = NotFound("taken back")
    assert (await run.advance())[-2:] == ["commit 2", "commit_refill 2 fails"]
    assert await run.advance() == RESUME
    assert "commit_refill 1" in await run.advance()


async def test_unreachable_scheduler_at_commit_causes_a_resume(run: Run) -> None:
    """After the retry time the outcome is unknown: only the checkpoint is certain."""
    await run.advance(2)
    run.world.faults["commit"] = Unavailable("no scheduler")
    with pytest.raises(Unavailable):
        await run.advance()
    assert await run.advance() == RESUME
    assert run.record.step == 0


async def test_crashed_learner_causes_a_resume(run: Run) -> None:
    """Its supervisor starts a new one without any state."""
    await run.advance(2)
    run.world.faults["step"] = RuntimeError("out of memory")
    with pytest.raises(RuntimeError):
        await run.advance()
    assert await run.advance() == RESUME


async def test_batch_of_a_non_finite_step_is_tombstoned(run: Run) -> None:
    """With the reason; the next step has the same number. One line names step, batch and tasks."""
    await run.advance()
    run.world.skip = "loss nan"
    with structlog.testing.capture_logs() as logged:
        events = await run.advance()
    (line,) = [each for each in logged if each["log_level"] == "error"]
    assert (line["event"], line["step"], line["batch_id"]) == ("batch_skipped", 1, "b")
    assert (line["task_ids"], line["reason"]) == (("t",), "loss nan")
    assert events == ["take", "prepare", "step", "tombstone step 1 skipped: loss nan"]
    assert run.record.step == 0
    assert await run.advance() == ["take", "prepare", "step", "commit 1", "publish 1"]


async def test_ten_batches_without_a_gradient_end_the_run(run: Run) -> None:
    """Ten in a row by default; one good step in between resets the count."""
    await run.advance()

    async def skipped(times: int) -> None:
        for _ in range(times):
            run.world.skip = "loss nan"
            await run.advance()

    await skipped(9)
    assert "commit 1" in await run.advance()
    await skipped(9)
    with pytest.raises(Diverged, match=r"10 batches in a row were skipped, .* loss nan"):
        await skipped(1)
    assert run.record.step == 1


async def test_etcd_outage_only_delays_publication(run: Run) -> None:
    """Training continues; the end waits until the last weights are announced."""
    await run.advance()
    for step in (1, 2, 3):
        run.world.faults["publish"] = Unavailable("etcd is away")
        assert f"commit {step}" in await run.advance()
    assert run.record.weight_version == 1
    run.world.faults["publish"] = Unavailable("etcd is away")
    with pytest.raises(Unavailable):
        await run.advance()
    assert run.record.phase != pb.TRAINER_PHASE_FINISHED
    assert await run.advance() == ["publish 3", "release"]
    assert run.record.weight_version == 2


async def test_step_waits_for_the_copy_of_the_weights_alone(run: Run) -> None:
    """The next step computes and commits during the announcement; its own copy waits for it."""
    await run.advance()
    run.world.etcd.clear()
    assert await run.advance() == ["take", "prepare", "step", "commit 1"]
    assert run.record.status().weight_version == 2
    second = asyncio.ensure_future(run.training.ask(Advance(), timeout_s=30))
    while "commit 2" not in run.world.events:
        await asyncio.sleep(0)
    assert not second.done() and run.world.kept == ["", ""]
    run.world.etcd.set()
    await second
    assert "publish 1" in run.world.events and run.world.kept == ["", "", ""]
    asked = asyncio.ensure_future(run.training.ask(SaveCheckpoint(), timeout_s=30))
    await asked
    assert run.world.events[-1] == "save 2" and "publish 2" in run.world.events
    assert run.record.weight_version == 3


async def test_failed_publication_beside_a_step_ends_the_run(run: Run) -> None:
    """Before the next batch is taken, if another trainer publishes; without etcd the version is
    counted back to the announced one."""
    await run.advance()
    run.world.etcd.clear()
    run.world.faults["publish"] = Unavailable("etcd is away")
    await run.advance()
    assert run.record.weight_version == 2 and run.world.evaluated == ["resumed"]
    run.world.etcd.set()
    run.world.faults["publish 2"] = Superseded("another trainer")
    await run.advance()
    assert run.world.evaluated == ["resumed", "1 not published", "2 not published"]
    run.world.events.clear()
    with pytest.raises(Superseded):
        await run.training.ask(Advance(), timeout_s=30)
    assert run.world.events == []


async def test_contents_of_a_checkpoint_are_not_kept_during_its_copy() -> None:
    """They are durable on this disk; a slow `checkpoint.copy_to` costs no memory."""
    world = World()
    world.disk.set()
    async with run_in(world, max_steps=3, copy_to="memory://run") as run:
        for _ in range(4):
            await run.training.ask(Advance(), timeout_s=30)
        await until(lambda: "copy /saved" in world.events)
        assert run.record.checkpoint_step == 2 and world.captured() is None
        world.remote.set()


async def test_full_disk_does_not_stop_training(run: Run) -> None:
    """Each step tries again; one line reports the failure, one the recovery."""
    await run.advance(2)
    with structlog.testing.capture_logs() as logged:
        for step in (2, 3):
            run.world.faults["save"] = ResourceExhausted("disk full")
            assert (await run.advance())[-1] == f"save {step} fails"
        assert run.record.checkpoint_step == 0
        assert (await run.advance())[0] == "save 3"
    told = [line for line in logged if line["event"].startswith("checkpoint_")]
    assert [(line["event"], line["step"]) for line in told] == [
        ("checkpoint_failed", 2),
        ("checkpoint_saved", 3),
    ]


async def test_training_continues_while_a_checkpoint_is_written(run: Run) -> None:
    """Only a durable checkpoint counts, and the last one is waited for."""
    await run.advance(2)
    run.world.disk.clear()
    assert "commit 2" in await run.advance()
    assert "commit 3" in await run.advance()
    assert run.record.checkpoint_step == 0
    asked = asyncio.ensure_future(run.training.ask(SaveCheckpoint(), timeout_s=30))
    await asyncio.sleep(0)
    assert not asked.done()
    run.world.disk.set()
    assert await asked == (3, "/saved")
    assert run.world.events[-2:] == ["save 2", "save 3"] and run.record.checkpoint_step == 3


async def test_resume_waits_for_a_checkpoint_in_progress(run: Run) -> None:
    """Otherwise a checkpoint of an abandoned lineage would appear on disk later."""
    await run.advance(2)
    run.world.disk.clear()
    await run.advance()
    run.world.faults["commit"] = NotFound("taken back")
    await run.advance()
    resumed = asyncio.ensure_future(run.training.ask(Advance(), timeout_s=30))
    await asyncio.sleep(0)
    run.world.disk.set()
    await resumed
    assert run.world.events[-4:] == ["save 2", "restore", "rewind 2", "publish 2"]


async def test_checkpoint_is_refused_during_a_resume(run: Run) -> None:
    """Ledger and learner do not agree yet."""
    with pytest.raises(Unavailable, match="being resumed"):
        await run.training.ask(SaveCheckpoint(), timeout_s=30)
    await run.advance(2)
    assert await run.training.ask(SaveCheckpoint(), timeout_s=30) == (1, "/saved")
    assert run.record.checkpoint_step == 1


async def test_resumed_finished_run_publishes_its_kept_model_once(run: Run) -> None:
    """The resume reads it from the checkpoint."""
    history: list[Entry] = [pb.StepMetrics(step=step) for step in (1, 2, 3)]
    run.world.saved = Checkpoint(path=Path("/saved"), step=3, weight_version=5, history=history)
    assert await run.advance() == ["restore", "rewind 3", "publish 3"]
    assert await run.advance() == ["release"]
