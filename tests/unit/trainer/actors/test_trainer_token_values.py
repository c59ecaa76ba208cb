"""From a committed step to a reader of its token values, and what may be lost between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from forge.client.stored.token_values import CLIPPED, joined
from forge.core.errors import DataLoss, MailboxFull, NotFound, ResourceExhausted
from forge.rl.losses.token_values import TokenValues
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.v1 import trainer_pb2 as pb
from services.trainer.actors import token_values
from services.trainer.actors.token_values import (
    ForgetAfter,
    KeptTokenValues,
    ReadValues,
    StoreValues,
    TokenValueStore,
    expire,
)
from services.trainer.samples.chosen_turns import SampleSize, TurnPlace
from services.trainer.samples.samples import BatchSamples
from services.trainer.service import MOST_READS, TrainerServicer
from services.trainer.setting_tables import TokenValuesSettings
from tests.support.runtime.waiting import until

SETTINGS = TokenValuesSettings()


def batch() -> BatchSamples:
    """Two turns of one trajectory, of three tokens and one."""
    return BatchSamples(
        samples=(),
        sizes=(SampleSize(0, 0, 3), SampleSize(1, 0, 1)),
        turns=(TurnPlace("t:0:0", 0), TurnPlace("t:0:0", 1)),
        outcomes={},
        groups=1,
        trajectories=1,
        flat_groups=0,
        excluded=0,
    )


def of_step(*numbers: int) -> TokenValues:
    """Values of samples; each token has its column's number times its place."""
    lengths = tuple((3, 1)[number] for number in numbers)
    columns = torch.arange(5.0)[:, None] * torch.arange(float(sum(lengths)))
    columns[4] %= 2
    return TokenValues(numbers=numbers, lengths=lengths, columns=columns.half())


class Mailbox:
    """A store that takes a few messages and handles none."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.messages: list[Any] = []

    def tell(self, message: Any) -> None:
        if len(self.messages) >= self.room:
            raise MailboxFull("full")
        self.messages.append(message)


async def pieces(
    responses: Sequence[pb.FetchTokenValuesResponse],
) -> AsyncIterator[pb.FetchTokenValuesResponse]:
    for one in responses:
        yield one


async def test_values_of_a_step_are_read_by_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, whose columns are those of the step; an unknown trajectory is not found."""
    monkeypatch.setattr(token_values, "PIECE_TOKENS", 2)
    actors = ActorSystem("test")
    store = await actors.spawn(lambda: TokenValueStore(tmp_path / "values", SETTINGS), name="store")
    kept = KeptTokenValues(store, SETTINGS)
    assert sorted(kept.chosen(batch(), step=1)) == [0, 1]
    kept.rewound(0)
    kept.keep(of_step(1, 0), batch(), step=1, version=6)
    responses = await store.ask(ReadValues(trajectory_id="t:0:0"), timeout_s=60)
    assert [(one.turn_index, one.first) for one in responses] == [(0, 0), (0, 2), (1, 0)]
    turns = await joined(pieces(responses))
    assert (turns[0].step, turns[0].weight_version) == (1, 6)
    # The second sample of the values is turn 0.
    assert turns[0].logprobs.tolist() == [0, 0, 0] and turns[0].log_ratios.tolist() == [1, 2, 3]
    assert turns[0].entropies.tolist() == [2, 4, 6] and turns[1].advantages.tolist() == [0]
    assert list(turns[0].flags) == [0, 0, 0] and list(turns[1].flags) == [0]
    with pytest.raises(NotFound):
        await store.ask(ReadValues(trajectory_id="t:1:0"), timeout_s=60)
    with pytest.raises(DataLoss, match="turn 0: values from token 2 on after 0"):
        await joined(pieces(responses[1:]))
    await actors.stop()


async def test_write_that_fails_costs_one_step(tmp_path: Path) -> None:
    """While a file blocks the directory, values are lost; the next step is stored again."""
    actors = ActorSystem("test")
    place = tmp_path / "values"
    place.touch()
    store = await actors.spawn(lambda: TokenValueStore(place, SETTINGS), name="store")
    kept = KeptTokenValues(store, SETTINGS)
    kept.keep(of_step(0), batch(), step=1, version=1)
    with pytest.raises(NotFound):
        await store.ask(ReadValues(trajectory_id="t:0:0"), timeout_s=60)
    place.unlink()
    kept.keep(of_step(0), batch(), step=2, version=2)
    (only,) = await store.ask(ReadValues(trajectory_id="t:0:0"), timeout_s=60)
    assert (only.step, only.turn_index, len(only.flags)) == (2, 0, 3)
    await actors.stop()


async def test_values_end_at_their_age_without_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that waits removes them too."""
    monkeypatch.setattr(token_values, "EXPIRY_S", 0.01)
    actors = ActorSystem("test")
    settings = TokenValuesSettings(max_age_h=1e-9)
    store = await actors.spawn(lambda: TokenValueStore(tmp_path / "values", settings), name="store")
    kept = KeptTokenValues(store, settings)
    kept.keep(of_step(0), batch(), step=1, version=1)
    await until((tmp_path / "values").is_dir)
    expiry = asyncio.create_task(expire(store))
    await until(lambda: not list((tmp_path / "values").iterdir()))
    expiry.cancel()
    await actors.stop()


def test_full_mailbox_loses_values_and_no_rewind() -> None:
    """Training waits for neither; values of the new lineage come after the rewind that made it."""
    store = Mailbox(room=1)
    kept = KeptTokenValues(cast(ActorRef, store), SETTINGS)
    kept.keep(of_step(0), batch(), step=5, version=5)
    kept.rewound(3)
    kept.keep(of_step(0), batch(), step=4, version=4)
    assert [type(one) for one in store.messages] == [StoreValues]
    store.messages.clear()
    store.room = 9
    kept.keep(of_step(0), batch(), step=5, version=5)
    kept.keep(of_step(0), batch(), step=6, version=6)
    assert store.messages[0] == ForgetAfter(step=3)
    assert [one.values.step for one in store.messages[1:]] == [5, 6]


def test_setting_of_zero_keeps_nothing() -> None:
    """No sample is chosen, and no message sent; the same without a store."""
    store = Mailbox(room=9)
    off = TokenValuesSettings(tokens_per_step=0)
    kept = KeptTokenValues(cast(ActorRef, store), off)
    assert kept.chosen(batch(), step=1) == ()
    kept.keep(TokenValues(), batch(), step=1, version=1)
    assert store.messages == []
    without = KeptTokenValues()
    assert without.chosen(batch(), step=1) == ()
    without.rewound(1)


class SlowStore:
    """Answers once `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked = 0

    async def ask(self, message: Any, *, timeout_s: float) -> list[pb.FetchTokenValuesResponse]:
        assert 0 < timeout_s <= 30
        self.asked += 1
        await self.go.wait()
        return [pb.FetchTokenValuesResponse(turn_index=1, flags=bytes([CLIPPED]))]


class Call:
    """Of a client with a deadline."""

    def time_remaining(self) -> float:
        return 5.0


async def test_calls_beyond_the_bound_are_refused_with_a_hint() -> None:
    """So that readers leave room in the mailbox; an ended call makes room for the next."""
    store = SlowStore()
    servicer = TrainerServicer(
        *cast(Any, (None, None, None)),
        steering=cast(Any, None),
        values=cast(ActorRef, store),
        versions=cast(Any, None),
        workers=cast(Any, None),
    )

    async def fetched() -> list[pb.FetchTokenValuesResponse]:
        request = pb.FetchTokenValuesRequest(trajectory_id="t:0:0")
        return [one async for one in servicer.FetchTokenValues(request, Call())]

    calls = [asyncio.create_task(fetched()) for _ in range(MOST_READS)]
    while store.asked < MOST_READS:
        await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted) as refused:
        await fetched()
    assert refused.value.retry_after_s == 1.0
    store.go.set()
    assert [len(await one) for one in calls] == [1] * MOST_READS
    assert len(await fetched()) == 1
