"""Values of trained tokens beside the tokens of a page."""

from __future__ import annotations

from array import array

import pytest

from forge.client.stored.token_values import CLIPPED, MASKED, TurnValues
from forge.core.errors import NotFound, Unavailable
from forge.v1 import common_pb2 as pb
from services.console.data.trajectories.token_rows import token_rows
from services.console.data.trajectories.token_texts import TokenTexts
from services.console.data.trajectories.token_values import (
    FRESH_S,
    NOT_STORED,
    TokenValuesCache,
    value_rows,
)
from tests.support.console.page import FakeValues, served
from tests.support.pool.records import make_turn

COLUMNS = ("logprobs", "log_ratios", "entropies", "advantages", "clipped", "masked")


def of_turn(*log_ratios: float, flags: bytes = b"", step: int = 3) -> TurnValues:
    """Values of tokens whose log ratios are given."""
    count = len(log_ratios)
    return TurnValues(
        step=step,
        weight_version=step + 4,
        logprobs=array("f", [-1.0] * count),
        log_ratios=array("f", log_ratios),
        entropies=array("f", [0.5] * count),
        advantages=array("f", [-0.25] * count),
        flags=bytearray(flags or bytes(count)),
    )


def forked() -> pb.Trajectory:
    """Turn 1 continues turn 0; two sampled tokens, then one."""
    turns = [
        make_turn(index=0, prompt=(1, 2, 3), sampled=(4, 5)),
        make_turn(index=1, parent=0, prefix=5, prompt=(6,), sampled=(7,)),
    ]
    return pb.Trajectory(trajectory_id="t:0:0", turns=turns)


def test_values_are_beside_their_tokens() -> None:
    """Also those of earlier turns of the sequence; prompt tokens have none."""
    both = {0: of_turn(0.5, -0.5, flags=bytes([CLIPPED, MASKED])), 1: of_turn(0.125)}
    rows = value_rows(forked(), 1, both, "", first=0, count=100)
    assert rows["log_ratios"] == [None, None, None, 0.5, -0.5, None, 0.125]
    assert rows["clipped"] == [None, None, None, True, False, None, False]
    assert rows["masked"] == [None, None, None, False, True, None, False]
    assert rows["entropies"][3:] == [0.5, 0.5, None, 0.5]
    assert rows["turns"] == {0: [3, 7], 1: [3, 7]}
    tokens = token_rows(forked(), 1, TokenTexts(), first=0, count=100)
    assert all(len(rows[name]) == len(tokens["ids"]) for name in COLUMNS)
    for size in (1, 2, 3):
        parts = [
            value_rows(forked(), 1, both, "", first=at, count=size) for at in range(0, 9, size)
        ]
        for name in COLUMNS:
            assert [one for part in parts for one in part[name]] == rows[name]


def test_turn_without_values_has_none_and_not_zero() -> None:
    """A turn that was not chosen; one with too few; a value that is no number of JSON."""
    rows = value_rows(forked(), 1, {1: of_turn(float("nan"))}, "", first=0, count=100)
    assert rows["log_ratios"] == [None] * 7
    assert rows["clipped"] == [*[None] * 6, False] and rows["turns"] == {1: [3, 7]}
    rows = value_rows(forked(), 1, {0: of_turn(0.5)}, "", first=0, count=100)
    assert rows["entropies"] == [None] * 7 and rows["turns"] == {}
    with pytest.raises(NotFound):
        value_rows(forked(), 2, {}, "", first=0, count=1)


async def test_trainer_is_asked_once_in_a_moment() -> None:
    """Also where it stores nothing, or does not answer: the note says which."""
    fake, now_s = FakeValues(), [0.0]
    cache = TokenValuesCache(fake.read, clock=lambda: now_s[0])
    assert await cache.get("t:0:0") == ({}, NOT_STORED)
    fake.refusal = Unavailable("no trainer is registered")
    fake.stored["t:0:0"] = {0: of_turn(0.5, 0.5)}
    assert (await cache.get("t:0:0"), fake.reads) == (({}, NOT_STORED), 1)
    now_s[0] = FRESH_S
    values, note = await cache.get("t:0:0")
    assert values == {} and note.endswith("no trainer is registered")
    fake.refusal = None
    now_s[0] *= 2
    assert await cache.get("t:0:0") == (fake.stored["t:0:0"], "")
    assert fake.reads == 3
    for number in range(20):
        await cache.get(f"u:{number}:0")
    await cache.get("t:0:0")
    assert fake.reads == 24


async def test_route_of_values_answers_beside_a_silent_trainer() -> None:
    """Tokens need no trainer; values then are missing, with the reason."""
    async with served() as console:
        console.pool.stored["t:0:0"] = forked()
        console.values.stored["t:0:0"] = {1: of_turn(0.25)}
        path = "/api/trajectories/t:0:0/turns/1"
        status, body = await console.get(f"{path}/values?first=4&count=9")
        assert (status, body["log_ratios"], body["note"]) == (200, [None, None, 0.25], "")
        assert body["turns"] == {"1": [3, 7]}
        assert (await console.get("/api/trajectories/t:0:0/turns/9/values"))[0] == 404
        assert (await console.get(f"{path}/values?count=0"))[0] == 400
        console.values.refusal = Unavailable("the trainer is away")
        console.pool.stored["u:0:0"] = forked()
        status, body = await console.get("/api/trajectories/u:0:0/turns/1/values")
        assert status == 200 and "the trainer is away" in body["note"]
        assert body["log_ratios"] == [None] * 7
        assert (await console.get("/api/trajectories/u:0:0/turns/1/tokens"))[0] == 200
