"""The answer of GetSchedulerStatus, with the cause of a stall."""

from __future__ import annotations

from dataclasses import asdict

from forge.core.queue.group_ledger import GroupTotals
from forge.v1 import scheduler_pb2
from services.scheduler.state.stalls import head_of, why
from services.scheduler.state.term_state import TermState
from services.scheduler.validation import ACTIVITIES

_ACTIVITIES = {activity: number for number, activity in ACTIVITIES.items()}
MOST_REASONS = 64
"""Most reasons of tombstones in one answer."""


def status_of(state: TermState, *, now_s: float) -> scheduler_pb2.GetSchedulerStatusResponse:
    """The state of a term at one moment."""
    queue, totals = state.queue, state.queue.ledger.totals()
    selection = queue.selection
    return scheduler_pb2.GetSchedulerStatusResponse(
        head=queue.window.head,
        window=queue.window.width,
        concurrency=queue.settings.concurrency,
        **asdict(totals),
        running_rollouts=len(queue.rollouts),
        domains=_domains(state),
        retries=queue.rollouts.retries,
        activity=_ACTIVITIES[queue.ledger.activity],
        mode=queue.settings.mode.value,
        admission=selection.admission,
        running_limit=selection.running_limit,
        staleness_p99=selection.staleness_p99,
        shift_kl=selection.last_shift_kl,
        skipped=state.equal.skipped,
        surplus=queue.rollouts.surplus,
        taking_over=now_s < queue.rollouts.hold_until_s,
        stall=_stall(state, totals, now_s),
        untrained_s=state.watch.idle_s(now_s),
        shards_away=sorted(state.unreachable),
        faults=state.watch.all_faults,
        unserved=[
            scheduler_pb2.UnservedTasks(domain=kind.domain, scaffold=kind.scaffold)
            for kind in state.unserved(now_s=now_s)
        ],
        draining_runners=_draining_runners(state),
    )


def _domains(state: TermState) -> list[scheduler_pb2.DomainStatus]:
    shares, progress = state.queue.shares.shares, state.progress
    return [
        scheduler_pb2.DomainStatus(
            domain=domain,
            share=shares.get(domain, 0.0),
            completed_rollouts=progress.completed(domain),
            recent_reward=progress.recent_reward(domain),
        )
        for domain in progress.domains(shares)
    ]


def _draining_runners(state: TermState) -> list[scheduler_pb2.DrainingRunner]:
    rollouts = state.queue.rollouts
    return [
        scheduler_pb2.DrainingRunner(
            runner_id=runner_id, start_id=start_id, running=rollouts.running_of(runner_id)
        )
        for runner_id, start_id in sorted(state.draining.start_ids.items())
    ]


def tombstones_of(state: TermState) -> list[scheduler_pb2.TombstoneReason]:
    """The reasons of tombstoned training groups in memory, the most frequent first."""
    found: dict[str, scheduler_pb2.TombstoneReason] = {}
    for group in state.queue.ledger.tombstoned():
        reason = found.setdefault(group.reason, scheduler_pb2.TombstoneReason(reason=group.reason))
        reason.groups += 1
        reason.task_id = group.spec.task_id
    return sorted(found.values(), key=lambda reason: -reason.groups)[:MOST_REASONS]


def _stall(state: TermState, totals: GroupTotals, now_s: float) -> scheduler_pb2.Stall | None:
    if state.watch.idle_s(now_s) < state.stall_after_s:
        return None
    queue = state.queue
    facts = state.watch.facts(
        now_s,
        batch_is_out=queue.batches.get(state.watch.batch_out()) is not None,
        activity=queue.ledger.activity,
        waiting=totals.pending + totals.eval_pending,
        queued=totals.queued,
        running=totals.running_groups,
        complete_in_window=totals.complete_in_window,
        assigned=queue.window.assigned,
        complete_outside_window=totals.complete_outside_window,
        rollouts=len(queue.rollouts),
        away=state.unreachable,
        head=head_of(queue),
        unserved=state.unserved(now_s=now_s),
        all_drained=state.watch.all_drained(now_s),
    )
    stall = why(facts, after_s=state.stall_after_s)
    return scheduler_pb2.Stall(cause=stall.cause, text=stall.text) if stall else None
