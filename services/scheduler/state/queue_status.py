"""What a term tells of itself: the answer to GetSchedulerStatus, and why nothing is trained on."""

from __future__ import annotations

from forge.core.queue.group_ledger import BookStatus
from forge.v1 import scheduler_pb2
from services.scheduler.state.stalls import head_of, why
from services.scheduler.state.term_state import TermState
from services.scheduler.validation import ACTIVITIES

_ACTIVITIES = {each: number for number, each in ACTIVITIES.items()}


def status_of(state: TermState, *, now_s: float) -> scheduler_pb2.GetSchedulerStatusResponse:
    queue, books = state.queue, state.queue.books.status()
    shares, adaptive = queue.shares.shares, state.queue.books.adaptive
    return scheduler_pb2.GetSchedulerStatusResponse(
        head=queue.books.window.head,
        window=queue.books.window.width,
        concurrency=queue.settings.concurrency,
        queued=books.queued,
        running_groups=books.running,
        running_rollouts=len(queue.rollouts),
        complete_in_window=books.complete_in_window,
        complete_outside_window=books.complete_outside_window,
        accepted=books.accepted,
        trained=books.trained,
        tombstoned=books.tombstoned,
        pending=books.pending,
        domains=[
            scheduler_pb2.DomainStatus(
                domain=domain,
                share=shares.get(domain, 0.0),
                completed_rollouts=state.progress.completed(domain),
                recent_reward=state.progress.recent_reward(domain),
            )
            for domain in state.progress.domains(shares)
        ],
        eval_pending=books.eval_pending,
        retries=queue.rollouts.retries,
        activity=_ACTIVITIES[queue.books.activity],
        mode=queue.settings.mode.value,
        admission="adaptive" if adaptive else queue.settings.admission.value,
        running_limit=adaptive.running_limit if adaptive else queue.settings.concurrency,
        staleness_p99=adaptive.staleness_p99 if adaptive else 0.0,
        shift_kl=adaptive.last_shift_kl if adaptive else 0.0,
        skipped=state.equal.skipped,
        surplus=queue.rollouts.surplus,
        taking_over=now_s < queue.rollouts.hold_until_s,
        stall=_stall(state, books, now_s),
        untrained_s=state.watch.idle_s(now_s),
        shards_away=sorted(queue.books.away),
        faults=state.watch.all_faults,
    )


def _stall(state: TermState, books: BookStatus, now_s: float) -> scheduler_pb2.Stall | None:
    if state.watch.idle_s(now_s) < state.stall_after_s:
        return None
    queue = state.queue
    facts = state.watch.facts(
        now_s,
        batch_is_out=queue.batches.get(state.watch.batch_out()) is not None,
        activity=queue.books.activity,
        waiting=books.pending + books.eval_pending,
        queued=books.queued,
        running=books.running,
        complete_in_window=books.complete_in_window,
        assigned=queue.books.window.assigned,
        complete_outside_window=books.complete_outside_window,
        rollouts=len(queue.rollouts),
        away=queue.books.away,
        head=head_of(queue),
    )
    stall = why(facts, after_s=state.stall_after_s)
    return scheduler_pb2.Stall(cause=stall.cause, text=stall.text) if stall else None
