"""Search for a text in recorded messages: complete and bounded; counts what it cannot read."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forge.core.errors import InvalidArgument
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.commands import FreeGroups
from services.pool.data.reads import text_search
from services.pool.store import PoolStore
from tests.support.pool.records import damage, make_group, make_turn
from tests.support.pool.store import append, change, commit, put_groups, seal, set_states


def said(*contents: str, **answer: Any) -> str:
    return json.dumps(
        {
            "shared": 0,
            "messages": [{"role": "user", "content": content} for content in contents],
            "answer": {"role": "assistant", "content": "", **answer},
        }
    )


def record(store: PoolStore, name: str, *turns: str) -> None:
    append(
        store,
        *(make_turn(name, at, parent=-1, messages_json=text) for at, text in enumerate(turns)),
    )
    seal(store, name, turns=len(turns))


def pages(
    store: PoolStore, text: str, *, size: int = 0, name_damaged: bool = False, **wanted: Any
) -> list[pool_pb2.SearchTrajectoriesResponse]:
    """Every page of a search."""
    found: list[pool_pb2.SearchTrajectoriesResponse] = []
    while not found or found[-1].next_page_token:
        request = pool_pb2.SearchTrajectoriesRequest(
            filter=pool_pb2.TrajectoryFilter(**wanted),
            text=text,
            page_size=size,
            page_token=found[-1].next_page_token if found else "",
        )
        look = partial(
            text_search.search, request=request, shard=store.shard, name_damaged=name_damaged
        )
        found.append(store.read(look))
    return found


def matches(store: PoolStore, text: str, **more: Any) -> list[tuple[str, int]]:
    return [
        (match.trajectory.trajectory_id, match.turn_index)
        for page in pages(store, text, **more)
        for match in page.matches
    ]


@pytest.fixture
def filled(store: PoolStore) -> PoolStore:
    call = {"id": "c", "function": {"name": "look", "arguments": '{"at": "Shelf \\"B\\""}'}}
    record(store, "a:0:0", said("What is it?"), said("Naïve QUESTION"))
    record(store, "b:0:0", said("Look.", tool_calls=[call]))
    record(store, "c:0:0", said("x", reasoning_content="line one\nline two"))
    record(store, "d:0:0", json.dumps({"request": '{"prompt": "of another protocol"}'}))
    return store


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("what is", [("a:0:0", 0)]),
        ("naïve question", [("a:0:0", 1)]),
        ('Shelf \\"b\\"', [("b:0:0", 0)]),
        ("LOOK", [("b:0:0", 0)]),
        ("one\nline", [("c:0:0", 0)]),
        ("another protocol", [("d:0:0", 0)]),
        ("content", []),
        ("nowhere", []),
    ],
)
def test_texts_of_messages_are_found(
    filled: PoolStore, text: str, expected: list[tuple[str, int]]
) -> None:
    """Contents, reasoning, calls and other protocols, whatever the case; no keys."""
    assert matches(filled, text) == expected
    assert matches(filled, text, size=1) == expected


def test_excerpt_shows_the_text_in_its_place(store: PoolStore) -> None:
    """With some characters around it, of a long message too."""
    record(store, "a:0:0", said("x" * 5000 + "Needle" + "y" * 5000))
    (page,) = pages(store, "needle")
    excerpt = page.matches[0].excerpt
    assert "xNeedley" in excerpt and len(excerpt) < 200


def test_search_ends_a_page_after_the_bytes_it_read(
    filled: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages may be empty; together they are the whole answer."""
    monkeypatch.setattr(text_search, "SEARCHED_BYTES", 1)
    found = pages(filled, "protocol")
    assert len(found) == 5
    assert [len(page.matches) for page in found] == [0, 0, 0, 1, 0]


def test_filter_narrows_a_search(filled: PoolStore) -> None:
    """The other conditions are those of a query."""
    assert matches(filled, "l", task_ids=["c"]) == [("c:0:0", 0)]
    assert matches(filled, "what", domain="math") == []


def test_turns_and_trajectories_without_text_are_counted(store: PoolStore) -> None:
    """Turns over token ids, and freed trajectories."""
    record(store, "a:0:0", said("here"), "", "")
    record(store, "b:0:0", said("here"))
    record(store, "c:0:0", "no JSON, but here")
    put_groups(store, make_group("b"))
    set_states(store, change("b", common_pb2.GROUP_STATE_TRAINED, batch_id="b", step=1))
    commit(store, FreeGroups(task_ids=("b",), covered_step=1, max_records=9, now_unix_s=1.0))
    (page,) = pages(store, "here")
    assert [match.trajectory.trajectory_id for match in page.matches] == ["a:0:0", "c:0:0"]
    (page,) = pages(store, "nowhere")
    assert (page.freed_trajectories, page.turns_without_text) == (1, 2)


def test_damaged_trajectory_is_named(open_store: Callable[..., PoolStore], tmp_path: Path) -> None:
    """The others are searched."""
    store = open_store(shard="s0")
    record(store, "a:0:0", said("here: marked"))
    record(store, "b:0:0", said("here"))
    store.close()
    damage(tmp_path / "shard", b"marked")
    (page,) = pages(open_store(), "here", name_damaged=True)
    assert [match.trajectory.trajectory_id for match in page.matches] == ["b:0:0"]
    assert page.damaged_trajectory_ids == ["a:0:0"]


def test_token_is_of_one_text(filled: PoolStore) -> None:
    """And a text has 1 to 1000 characters."""
    request = pool_pb2.SearchTrajectoriesRequest(text="o", page_size=1)
    page = filled.read(partial(text_search.search, request=request, shard=filled.shard))
    other = pool_pb2.SearchTrajectoriesRequest(text="a", page_token=page.next_page_token)
    for wrong in (other, pool_pb2.SearchTrajectoriesRequest(text="x" * 1001), request.__class__()):
        with pytest.raises(InvalidArgument):
            filled.read(partial(text_search.search, request=wrong, shard=filled.shard))
