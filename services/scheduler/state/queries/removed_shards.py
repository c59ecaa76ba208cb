"""Pending and settled groups of pool shards that are removed: those that move, and those that are
left."""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.state.messages.removals import FindMovable, Movable, OnShard
from services.scheduler.state.term_state import TermState


def movable(state: TermState, ask: FindMovable, *, now_s: float) -> Movable:
    """The pending groups of a shard: those without leases may move."""
    ledger = state.queue.ledger
    pending = [group for group in ledger.on_shard(ask.shard) if not group.phase.consumed]
    unknown = [task_id for task_id in ask.listed if task_id not in ledger]
    if ask.shard not in state.retiring or now_s < state.queue.rollouts.hold_until_s:
        # Its rollouts are still leased, or runners of an earlier term may renew.
        return Movable(task_ids=(), busy=len(pending), unknown=unknown)
    idle: Sequence[str] = [group.spec.task_id for group in pending if group.idle]
    return Movable(task_ids=idle[: ask.most], busy=len(pending) - len(idle), unknown=unknown)


def on_shard(state: TermState, shard: str) -> OnShard:
    """The groups of a shard, to be stored on others."""
    groups = state.queue.ledger.on_shard(shard)
    return OnShard(
        records=[state.catalog.record(group, payload=True) for group in groups],
        forgotten=state.queue.ledger.forgotten_on(shard),
    )
