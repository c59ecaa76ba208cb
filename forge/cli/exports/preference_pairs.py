"""Pairs of rollouts of one task, ordered by reward.

Owns the choice of pairs: those with the largest differences, of the last conversation of each
rollout. A group is read when the query returns its first matching trajectory, so memory holds one
group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from forge.cli.exports.chat_rows import ChatRow, preference_row
from forge.client.reward_events import reward_sum
from forge.client.stored.conversations import StoredConversation, conversations
from forge.client.stored.pool import Page, PoolReader
from forge.core.errors import InvalidArgument
from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2, pool_pb2

RECENT_GROUPS = 4096
"""Groups whose pairs are not computed again: a query by time mixes the trajectories of groups."""


class GroupPairs:
    """Makes the pairs of each group once."""

    def __init__(
        self,
        reader: PoolReader,
        wanted: pool_pb2.TrajectoryFilter,
        *,
        margin: float,
        most: int,
        on_damage: Callable[[str, Iterable[str]], None],
    ) -> None:
        self._reader = reader
        self._wanted = wanted
        self._margin = margin
        self._most = most
        self._on_damage = on_damage
        self._recent: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.close = 0
        """Groups without two rewards that differ by the margin."""
        self.unlike = 0
        """Groups with such rewards and without a pair."""
        self.freed = 0
        """Matching trajectories that were freed."""

    async def beginning_with(
        self, shard: str, first: common_pb2.TrajectorySummary
    ) -> Sequence[ChatRow]:
        """Returns the pairs of a group if `first` is its first matching trajectory."""
        task_id = first.trajectory_id.partition(":")[0]
        if (shard, task_id) in self._recent:
            return []
        group = await self._reader.group(shard, task_id, self._wanted)
        self._on_damage(shard, group.damaged)
        self._recent[shard, task_id] = None
        if len(self._recent) > RECENT_GROUPS:
            self._recent.popitem(last=False)
        known = [_place(one) for one in group.trajectories]
        if known and _place(first) > min(known):
            # The group left the recent ones.
            return []
        return await self._pairs(group)

    async def _pairs(self, group: Page) -> Sequence[ChatRow]:
        stored = [one for one in group.trajectories if not one.freed]
        self.freed += len(group.trajectories) - len(stored)
        rewards = {
            one.trajectory_id: reward
            for one in stored
            if (reward := reward_sum(one.rewards, self._wanted.reward_name)) is not None
        }
        pairs = sorted(
            (low - high, better, worse)
            for better, high in rewards.items()
            for worse, low in rewards.items()
            if high > low and high - low >= self._margin
        )
        talks: dict[str, StoredConversation | None] = {}
        rows: list[ChatRow] = []
        for difference, better, worse in pairs:
            for name in (better, worse):
                if name not in talks:
                    talks[name] = await self._last_conversation(group.shard, name)
            row = self._row(group, -difference, better, worse, talks, rewards)
            if row is not None:
                rows.append(row)
            if len(rows) == self._most:
                break
        self.close += not pairs
        self.unlike += bool(pairs) and not rows
        return rows

    def _row(
        self,
        group: Page,
        difference: float,
        better: str,
        worse: str,
        talks: dict[str, StoredConversation | None],
        rewards: dict[str, float],
    ) -> ChatRow | None:
        chosen, rejected = talks[better], talks[worse]
        if chosen is None or rejected is None:
            return None
        facts: dict[str, str | float] = {
            "task_id": better.partition(":")[0],
            "domain": group.trajectories[0].domain,
            "chosen_id": better,
            "rejected_id": worse,
            "chosen_reward": rewards[better],
            "rejected_reward": rewards[worse],
            "margin": difference,
        }
        return preference_row(chosen, rejected, facts=facts)

    async def _last_conversation(self, shard: str, trajectory_id: str) -> StoredConversation | None:
        """The conversation that ends with the last answer; None without messages."""
        damaged: list[str] = []
        talks: list[StoredConversation] = []
        async for one in self._reader.fetch(shard, [trajectory_id], on_damage=damaged.append):
            try:
                talks, _ = conversations(one.turns)
            except InvalidArgument:
                damaged.append(trajectory_id)
        self._on_damage(shard, damaged)
        return talks[-1] if talks else None


def _place(one: common_pb2.TrajectorySummary) -> tuple[int, int]:
    name = parse_trajectory_id(one.trajectory_id)
    return name.rollout_index, name.attempt
