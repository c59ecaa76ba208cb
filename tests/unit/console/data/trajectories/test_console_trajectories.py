"""Trajectories as plain data: lists, groups, turns, tokens."""

from __future__ import annotations

import itertools
import json
from typing import Any, cast

import pytest

from forge.client.stored.pool import PoolReader
from forge.core.errors import InvalidArgument, NotFound
from forge.v1 import common_pb2 as pb
from services.console.data.topics import START, News
from services.console.data.trajectories import trajectory_list
from services.console.data.trajectories.closes import Closes
from services.console.data.trajectories.token_rows import token_rows
from services.console.data.trajectories.token_texts import TokenTexts
from services.console.data.trajectories.trajectory_cache import FRESH_S, TrajectoryCache
from services.console.data.trajectories.trajectory_list import (
    TrajectoryList,
    filter_of,
    whole_number,
)
from services.console.data.trajectories.trajectory_page import messages_of, trajectory_row
from tests.support.console.page import FakePool
from tests.support.pool.records import make_turn


def listed(pool: FakePool, *, now_s: float = 1e6) -> TrajectoryList:
    return TrajectoryList(cast(PoolReader, pool), clock=lambda: now_s)


def forked() -> pb.Trajectory:
    """Turn 1 continues turn 0; turn 2 keeps the first two tokens of turn 0."""
    return pb.Trajectory(
        trajectory_id="t:0:0",
        turns=[
            make_turn(index=0, prompt=(1, 2, 3), sampled=(4, 5), version=7),
            make_turn(index=1, prefix=5, prompt=(6,), sampled=(7,), version=8),
            make_turn(index=2, parent=0, prefix=2, prompt=(9,), sampled=(10, 11), version=9),
        ],
    )


@pytest.mark.parametrize(
    "query",
    [
        {"state": "done"},
        {"min_reward": "much"},
        {"min_version": "1.5"},
        {"max_version": "99999999999"},
        {"where": "repository"},
        {"where": "=b"},
    ],
)
def test_wrong_filter_is_refused(query: dict[str, str]) -> None:
    """With a message that names it."""
    with pytest.raises(InvalidArgument):
        filter_of(query)


def test_filter_has_only_given_bounds() -> None:
    """An empty field restricts nothing."""
    found = filter_of({"domain": "code", "state": "sealed", "min_reward": "0.5", "max_reward": ""})
    assert (found.domain, found.state, found.min_reward) == ("code", 2, 0.5)
    assert not found.HasField("max_reward") and not found.HasField("min_weight_version")


def test_filter_has_labels_and_metadata() -> None:
    """Those that the pool has indexes of; several facts with commas."""
    found = filter_of({"tag": " eval-7 ", "scaffold": "s", "user": "ada", "where": "a=b, c=d=e,"})
    assert (found.tag, found.scaffold, found.user) == ("eval-7", "s", "ada")
    assert dict(found.metadata) == {"a": "b", "c": "d=e"}


async def test_list_of_a_label_looks_once_at_all_time() -> None:
    """An index finds it; a start time would have the records of all groups read."""
    pool = FakePool()
    pool.put("t:0:0")
    found = await listed(pool).newest(filter_of({"tag": "trial"}))
    assert [one.HasField("closed_from_unix_s") for one in pool.asked] == [False]
    assert len(found["rows"]) == 1 and found["complete"]


async def test_search_continues_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a number of matches, and after a time without any; the last answer has no next."""
    pool = FakePool()
    for number in range(5):
        said = "needle" if number != 2 else "hay"
        pool.put(f"t{number}:0:0", make_turn(messages_json=said))
    monkeypatch.setattr(trajectory_list, "MOST_MATCHES", 2)
    found = await listed(pool).search(filter_of({}), "needle", after="")
    assert [row["id"] for row in found["rows"]] == ["t0:0:0", "t1:0:0"]
    assert (found["rows"][0]["turn"], found["rows"][0]["excerpt"]) == (0, "needle")
    found = await listed(pool).search(filter_of({}), "needle", after=found["next"])
    assert [row["id"] for row in found["rows"]] == ["t3:0:0", "t4:0:0"]
    times = itertools.count(step=trajectory_list.SEARCH_S + 1)
    slow = TrajectoryList(cast(PoolReader, pool), monotonic=lambda: next(times))
    found = await slow.search(filter_of({}), "nothing", after="")
    assert found["rows"] == [] and found["next"]
    assert (await listed(pool).search(filter_of({}), "nothing", after=""))["next"] == ""


@pytest.mark.parametrize("text", ["-1", "x", "1" * 12, "", "²"])
def test_count_of_a_request_must_be_a_number(text: str) -> None:
    """Also of a hand-made one."""
    with pytest.raises(InvalidArgument, match="first"):
        whole_number({"first": text}, "first", 0)


async def test_list_has_the_newest_first() -> None:
    """It looks back further until it has enough, and no further."""
    pool = FakePool()
    for number in range(3):
        pool.put(f"t{number}:0:0")
    found = await listed(pool).newest(filter_of({}))
    assert [row["id"] for row in found["rows"]] == ["t2:0:0", "t1:0:0", "t0:0:0"]
    assert found["complete"] and len(pool.asked) == 5
    row = found["rows"][0]
    assert (row["outcome"], row["state"], row["task_id"]) == (1.0, "sealed", "t2")


async def test_list_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By trajectories, and by the pages that are read for them."""
    monkeypatch.setattr(trajectory_list, "MOST", 4)
    monkeypatch.setattr(trajectory_list, "PAGE", 2)
    pool = FakePool()
    for number in range(30):
        pool.put(f"t{number}:0:0")
    found = await listed(pool, now_s=30.0).newest(filter_of({}))
    assert [row["id"] for row in found["rows"]] == ["t29:0:0", "t28:0:0", "t27:0:0", "t26:0:0"]
    assert not found["complete"] and len(pool.asked) == 1
    monkeypatch.setattr(trajectory_list, "MOST_PAGES", 3)
    found = await listed(pool, now_s=30.0).newest(filter_of({}))
    assert len(found["rows"]) == 4 and not found["complete"]


async def test_group_has_all_attempts_with_advantages() -> None:
    """Outcome less the group's mean; one beyond the first ids that are looked up, too."""
    pool = FakePool()
    for rollout, outcome in ((0, 1.0), (1, 0.0), (70, 0.5)):
        pool.put(f"t:{rollout}:0", make_turn(), outcome=outcome)
    pool.put("t:1:1")
    group = await listed(pool).group("t")
    assert [row["id"] for row in group["rows"]] == ["t:0:0", "t:1:0", "t:1:1", "t:70:0"]
    assert [row["advantages"] for row in group["rows"]] == [[0.5], [-0.5], None, [0.0]]
    assert await listed(pool).advantages("t:1:0") == [-0.5]
    with pytest.raises(NotFound, match="task other"):
        await listed(pool).group("other")
    with pytest.raises(InvalidArgument):
        await listed(pool).group("../etc")


def test_turns_have_their_place_and_messages() -> None:
    """Branches as the terminal shows them; contents are texts, whatever the agent sent."""
    one = forked()
    one.turns[0].messages_json = json.dumps(
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "<b>hi</b>"}]}, 5],
            "answer": {
                "role": "assistant",
                "content": None,
                "reasoning_content": "think",
                "tool_calls": [{"function": {"name": "run", "arguments": {"x": 1}}}, "odd"],
            },
        }
    )
    one.turns[2].parse_error = "{oops"
    row = trajectory_row(one, [0.25, 0.25, -0.5])
    assert row["branches"] == [[0, 1], [2]]
    first, second, third = row["turns"]
    assert (second["context"], second["shared"], second["sampled"]) == (6, 5, 1)
    assert (third["versions"], third["parse_error"], third["advantage"]) == ([9, 9], "{oops", -0.5)
    assert first["mean_logprob"] == -0.25
    user, answer = first["messages"]
    assert "<b>hi</b>" in user["content"]
    assert (answer["answer"], answer["content"], answer["reasoning"]) == (True, "", "think")
    assert answer["calls"] == [{"name": "run", "arguments": '{\n "x": 1\n}'}]


@pytest.mark.parametrize(
    "recorded",
    ["", "{", "[]", '"x"', '{"messages": 5}', '{"answer": 3}', '{"answer": {"tool_calls": 7}}'],
)
def test_odd_messages_are_no_error(recorded: str) -> None:
    """Records of other releases, and of agents that send anything."""
    assert all(isinstance(one["content"], str) for one in messages_of(recorded))


def test_tokens_follow_the_sequence_of_a_turn() -> None:
    """Shared tokens of ancestors, with log-probs and versions where they were sampled."""
    rows = token_rows(forked(), 1, TokenTexts(), first=0, count=100)
    assert rows["ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert rows["turns"] == [-1, -1, -1, 0, 0, -1, 1]
    assert rows["versions"] == [-1, -1, -1, 7, 7, -1, 8]
    assert rows["logprobs"] == [None, None, None, -0.25, -0.25, None, -0.25]
    assert (rows["total"], rows["texts"]) == (7, None)
    rows = token_rows(forked(), 2, TokenTexts(), first=0, count=100)
    assert (rows["ids"], rows["turns"]) == ([1, 2, 9, 10, 11], [-1, -1, -1, 2, 2])


def test_parts_of_tokens_make_the_whole() -> None:
    """Any cut; beyond the end is nothing."""
    whole = token_rows(forked(), 1, TokenTexts(), first=0, count=100)
    for size in (1, 2, 3, 5):
        parts = [
            token_rows(forked(), 1, TokenTexts(), first=at, count=size) for at in range(0, 9, size)
        ]
        for column in ("ids", "turns", "versions", "logprobs"):
            assert [each for part in parts for each in part[column]] == whole[column]


@pytest.mark.parametrize(("turn", "count"), [(3, 10), (0, 0), (0, 20_001)])
def test_unknown_turn_and_wrong_count_are_refused(turn: int, count: int) -> None:
    """NotFound or InvalidArgument."""
    with pytest.raises((NotFound, InvalidArgument)):
        token_rows(forked(), turn, TokenTexts(), first=0, count=count)


def test_texts_of_tokens_are_bytes_of_the_alphabet() -> None:
    """Byte-level pieces, and SentencePiece's; an id beyond the vocabulary has its number."""

    class Pieces:
        def id_to_token(self, token_id: int) -> str | None:
            return {0: "Ġhi", 1: "Ċ", 2: "Ã", 3: "▁the", 4: "<|end|>"}.get(token_id)

    texts = TokenTexts(Pieces())
    assert [texts.of(number) for number in range(6)] == [" hi", "\n", "�", " the", "<|end|>", "<5>"]
    assert not TokenTexts.load("").known
    assert not TokenTexts.load("/nowhere").known


async def test_cache_reads_once_and_forgets_the_oldest() -> None:
    """Within a size and for a short time: rewards may follow."""
    pool, now_s = FakePool(), [0.0]
    for name in ("a", "b", "c"):
        pool.put(f"{name}:0:0", make_turn(prompt=range(100)))
    size = pool.stored["a:0:0"].ByteSize()
    cache = TrajectoryCache(pool.find, most_bytes=2 * size + 10, clock=lambda: now_s[0])
    for name in ("a", "a", "b", "a", "c", "a", "b"):
        await cache.get(f"{name}:0:0")
    assert pool.fetched == ["a:0:0", "b:0:0", "c:0:0", "b:0:0"]
    now_s[0] = FRESH_S + 1
    await cache.get("b:0:0")
    assert pool.fetched[4:] == ["b:0:0"]
    with pytest.raises(NotFound):
        await cache.get("d:0:0")


def test_slow_page_learns_of_missed_closes() -> None:
    """The newest are kept; a new page begins with none."""

    async def nothing() -> Any:
        return
        yield

    topic = Closes(News(), nothing)
    topic.add(pb.TrajectorySummary(trajectory_id="a:0:0"))
    payload, cursor = topic.since(START)
    assert payload is not None and json.loads(payload)["rows"] == []
    assert topic.since(cursor) == (None, cursor)
    for number in range(250):
        topic.add(pb.TrajectorySummary(trajectory_id=f"t{number}:0:0"))
    payload, _ = topic.since(cursor)
    assert payload is not None
    event = json.loads(payload)
    assert (len(event["rows"]), event["missed"]) == (200, 50)
    assert event["rows"][-1]["id"] == "t249:0:0"
