"""The way of groups through a real scheduler, a real pool and a real etcd."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from forge.core.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from forge.v1 import common_pb2, scheduler_pb2
from tests.support.scheduler.cluster import (
    SchedulerCluster,
    assert_counts_balance,
    ids_of,
    make_task,
)


async def test_group_goes_from_submission_to_trained(forge: SchedulerCluster) -> None:
    """Submitted, sampled, batched and committed: the counts and the listing agree."""
    forge.start_scheduler()
    assert await forge.submit([make_task("a", size=2), make_task("b", size=2)]) == 2
    assert await forge.submit([make_task("a", size=2)]) == 0
    await forge.complete(4, reward=0.5)
    batch = await forge.take()
    assert ids_of(batch) == ["a", "b"]
    assert [len(group.trajectories) for group in batch.groups] == [2, 2]
    assert batch.groups[0].group.state == common_pb2.GROUP_STATE_BATCHED
    await forge.commit(batch, 1)
    await forge.commit(batch, 1)
    status = await forge.status()
    assert (status.head, status.trained, status.pending) == (2, 2, 0)
    assert status.domains[0].completed_rollouts == 4
    assert status.domains[0].recent_reward == 0.5
    assert_counts_balance(status)
    (first, _) = await forge.groups()
    assert first.group.state == common_pb2.GROUP_STATE_TRAINED
    assert (first.group.step, first.group.batch_id) == (1, batch.batch_id)


async def test_session_token_has_the_context_of_its_domain(forge: SchedulerCluster) -> None:
    """If one is set; other domains have the model's."""
    forge.start_scheduler(domain_context_tokens="short=512")
    capped, free = make_task("a"), make_task("b")
    capped.domain = "short"
    await forge.submit([capped, free])
    leases = await forge.lease(2)
    claims = [forge.keyring.verify(each.session_token, now_s=0.0) for each in leases]
    assert [each.context_tokens for each in claims] == [512, 0]


async def test_evaluation_is_listed_by_tag_with_its_rewards(forge: SchedulerCluster) -> None:
    """Held-out groups go first, end as EVALUATED, and are found by their tag."""
    forge.start_scheduler()
    await forge.submit([make_task("train"), make_task("held-out", evaluation=True, tag="before")])
    (lease,) = await forge.lease(1)
    assert lease.task.task_id == "held-out"
    await forge.seal(lease, reward=0.25)
    await forge.finish([lease])
    (found,) = await forge.groups("before")
    assert found.group.state == common_pb2.GROUP_STATE_EVALUATED
    assert [event.value for event in found.trajectories[0].rewards] == [0.25]
    status = await forge.status()
    assert (status.accepted, status.eval_pending) == (1, 0)


async def test_waiting_calls_are_answered_by_the_next_change(forge: SchedulerCluster) -> None:
    """An early runner and an early trainer get theirs without a second call."""
    forge.start_scheduler()
    await forge.leader()
    runner = asyncio.create_task(forge.lease(1))
    trainer = asyncio.create_task(forge.take(groups=1))
    await forge.submit([make_task("a")])
    (lease,) = await runner
    await forge.seal(lease)
    await forge.finish([lease])
    assert ids_of(await trainer) == ["a"]


async def test_empty_queue_answers_empty_when_the_wait_is_over(forge: SchedulerCluster) -> None:
    """An empty answer is no error."""
    forge.start_scheduler()
    assert await forge.lease(1, wait_s=0.0) == []
    assert (await forge.take(wait_s=0.0)).batch_id == ""


async def test_session_token_names_the_trajectory_and_its_shard(forge: SchedulerCluster) -> None:
    """The gateway learns from the token alone what it records, and where."""
    forge.start_scheduler()
    task = make_task("a", domain="qa")
    task.models.append("judge")
    await forge.submit([task])
    (lease,) = await forge.lease(1)
    claims = forge.keyring.verify(lease.session_token, now_s=0.0)
    assert claims.models == ("judge",)
    assert (claims.trajectory_id, claims.task_id) == (lease.trajectory_id, "a")
    assert (claims.domain, claims.pool_shard) == ("qa", "s0")
    assert claims.scopes == {"session"}
    assert not claims.agent_rewards


async def test_lease_has_a_grader_token_beside_the_agents(forge: SchedulerCluster) -> None:
    """Equal except for the scope; only the task lets its agent report rewards."""
    forge.start_scheduler()
    task = make_task("a")
    task.agent_rewards = True
    await forge.submit([task])
    (lease,) = await forge.lease(1)
    claims = forge.keyring.verify(lease.session_token, now_s=0.0)
    grader = forge.keyring.verify(lease.grader_token, now_s=0.0)
    assert claims.agent_rewards
    changes: Any = {"scopes": frozenset({"grader"}), "token_id": grader.token_id}
    assert grader == replace(claims, **changes)
    assert grader.token_id != claims.token_id


async def test_rollout_reported_done_but_not_sealed_is_retried(forge: SchedulerCluster) -> None:
    """The pool decides: a runner's report alone does not complete a rollout."""
    forge.start_scheduler()
    await forge.submit([make_task("a")])
    (lease,) = await forge.lease(1)
    await forge.finish([lease])
    (retry,) = await forge.lease(1)
    assert retry.trajectory_id != lease.trajectory_id
    assert retry.failures == 1


async def test_sealed_rollout_counts_although_its_runner_failed(forge: SchedulerCluster) -> None:
    """An error after the seal loses nothing."""
    forge.start_scheduler()
    await forge.submit([make_task("a")])
    (lease,) = await forge.lease(1)
    await forge.seal(lease)
    await forge.finish([lease], error="connection lost")
    assert ids_of(await forge.take(groups=1)) == ["a"]


async def test_group_with_a_permanent_failure_is_tombstoned_with_its_reason(
    forge: SchedulerCluster,
) -> None:
    """The tombstone is stored and survives the leader."""
    first = forge.start_scheduler()
    await forge.submit([make_task("a", tag="x"), make_task("b")])
    (lease,) = await forge.lease(1)
    await forge.finish([lease], error="unknown scaffold", permanent=True)
    status = await forge.status()
    assert (status.tombstoned, status.head) == (1, 1)
    assert first.terminate() == 0
    forge.start_scheduler()
    (found,) = await forge.groups("x")
    assert found.group.state == common_pb2.GROUP_STATE_TOMBSTONED
    assert found.group.reason == "rollout 0: unknown scaffold"
    assert_counts_balance(await forge.status())


async def test_silent_runner_loses_its_claim_but_not_its_work(forge: SchedulerCluster) -> None:
    """At the end of a claim the pool is asked: a sealed rollout counts, any other is retried."""
    forge.start_scheduler(queue={"rollout_lease_s": "4"})
    await forge.submit([make_task("sealed"), make_task("lost")])
    sealed, lost = await forge.lease(2)
    await forge.seal(sealed)
    (retry,) = await forge.lease(1)
    assert retry.task.task_id == "lost"
    assert await forge.renew([lost]) == [lost.lease_id]
    assert ids_of(await forge.take(groups=1)) == ["sealed"]


async def test_rewind_makes_trained_groups_visible_again(forge: SchedulerCluster) -> None:
    """A trainer that restored step 1 gets the groups that step 2 had consumed, also under another
    leader."""
    first = forge.start_scheduler()
    await forge.submit([make_task(name) for name in "abcd"])
    await forge.complete(4)
    await forge.commit(await forge.take(), 1)
    await forge.commit(await forge.take(), 2)
    assert (await forge.ask("Rewind", scheduler_pb2.RewindRequest(step=1))).groups == 2
    assert (await forge.ask("Rewind", scheduler_pb2.RewindRequest(step=1))).groups == 0
    first.terminate()
    forge.start_scheduler()
    assert (await forge.status()).trained == 2
    assert ids_of(await forge.take()) == ["c", "d"]


async def test_released_batch_is_leased_again(forge: SchedulerCluster) -> None:
    """Released without a reason, the groups keep their place; with one, they are tombstoned."""
    forge.start_scheduler()
    await forge.submit([make_task("a"), make_task("b")])
    await forge.complete(2)
    first = await forge.take()
    release = scheduler_pb2.ReleaseBatchRequest(batch_id=first.batch_id)
    await forge.ask("ReleaseBatch", release)
    second = await forge.take()
    assert ids_of(second) == ids_of(first)
    release = scheduler_pb2.ReleaseBatchRequest(batch_id=second.batch_id, reason="checksum failed")
    await forge.ask("ReleaseBatch", release)
    status = await forge.status()
    assert (status.tombstoned, status.pending) == (2, 0)


async def test_invalid_input_is_refused_by_field_and_value(forge: SchedulerCluster) -> None:
    """Each mistake has a clear status, and none changes the state."""
    forge.start_scheduler(max_queued_groups="2")
    await forge.submit([make_task("known")])
    bad = make_task("x")
    bad.payload_json = "[1, 2]"
    different = make_task("known", size=3)
    for task, complaint in (
        (make_task("no spaces"), "task_id 'no spaces' must be"),
        (make_task("x", domain=""), "domain '' must be"),
        (make_task("x", size=0), "group_size 0 must be 1 to"),
        (bad, "payload_json .* is not a JSON object"),
        (different, "'known' was submitted before with different content"),
    ):
        with pytest.raises(InvalidArgument, match=complaint):
            await forge.submit([make_task("fine"), task])
    with pytest.raises(ResourceExhausted, match="max_queued_groups is 2"):
        await forge.ask(
            "SubmitTasks",
            scheduler_pb2.SubmitTasksRequest(tasks=[make_task("y"), make_task("z")]),
            retry_for_s=0.0,
        )
    with pytest.raises(InvalidArgument, match="max_rollouts 0"):
        await forge.lease(0)
    with pytest.raises(InvalidArgument, match="wait_s nan"):
        await forge.lease(1, wait_s=float("nan"))
    assert (await forge.status()).accepted == 1


async def test_unknown_names_are_not_found(forge: SchedulerCluster) -> None:
    """An id that was never leased cannot be finished, renewed or committed. A result of it holds
    back no other one of the call."""
    forge.start_scheduler()
    await forge.submit([make_task("a")])
    (known,) = await forge.lease(1)
    await forge.seal(known)
    results = [
        scheduler_pb2.FinishRolloutsRequest.Outcome(trajectory_id=each)
        for each in ("nobody:0:0", known.trajectory_id)
    ]
    answer = await forge.ask(
        "FinishRollouts", scheduler_pb2.FinishRolloutsRequest(outcomes=results)
    )
    assert {refusal.trajectory_id: refusal.error for refusal in answer.refused} == {
        "nobody:0:0": "task_id 'nobody' is not in the queue"
    }
    assert (await forge.status()).complete_in_window == 1
    with pytest.raises(NotFound, match="batch_id 'b' is not leased"):
        await forge.ask("RenewBatch", scheduler_pb2.RenewBatchRequest(batch_id="b"))
    with pytest.raises(NotFound, match="batch_id 'b' is not leased"):
        await forge.ask("CommitBatch", scheduler_pb2.CommitBatchRequest(batch_id="b", step=1))
    with pytest.raises(InvalidArgument, match="step 0"):
        await forge.ask("CommitBatch", scheduler_pb2.CommitBatchRequest(batch_id="b"))


async def test_batch_is_committed_by_one_step_only(forge: SchedulerCluster) -> None:
    """The same batch under another step is refused as the trainer's mistake."""
    forge.start_scheduler()
    await forge.submit([make_task("a"), make_task("b")])
    await forge.complete(2)
    batch = await forge.take()
    await forge.commit(batch, 1)
    with pytest.raises(FailedPrecondition, match="by step 1, not by step 2"):
        await forge.commit(batch, 2)
