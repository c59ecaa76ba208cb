"""The order over items on pool shards, against a list that is searched from end to end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forge.core.queue.dispatch.lanes import Key, Lanes

SHARDS = ("s0", "s1", "s2")

steps = st.one_of(
    st.tuples(st.just("push"), st.sampled_from(SHARDS), st.integers(0, 9)),
    st.tuples(st.just("end"), st.integers(0, 99)),
    st.tuples(st.just("take")),
    st.tuples(st.just("away"), st.frozensets(st.sampled_from(SHARDS))),
)


@given(st.lists(steps, max_size=80))
def test_first_group_is_the_lowest_waiting_one_of_a_reachable_shard(
    history: list[tuple[object, ...]],
) -> None:
    """For any order of pushes, ends, takes and outages."""
    waiting: dict[int, tuple[Key, str]] = {}
    lanes: Lanes[int] = Lanes(lambda item, _: item in waiting)
    away: frozenset[str] = frozenset()
    for number, step in enumerate(history):
        match step:
            case ("push", str(shard), int(place)):
                key = (float(place), number, 0)
                waiting[number] = (key, shard)
                lanes.push(shard, key, number)
            case ("end", int(which)) if waiting:
                del waiting[sorted(waiting)[which % len(waiting)]]
            case ("away", frozenset() as away):
                pass
        usable = [(key, item) for item, (key, shard) in waiting.items() if shard not in away]
        expected = min(usable, default=None)
        assert lanes.first(away) == expected
        if step == ("take",) and expected:
            del waiting[expected[1]]


def test_lane_emptied_in_an_outage_serves_new_groups() -> None:
    """A group pushed later counts as soon as the shard answers."""
    waiting = {1, 2}
    lanes: Lanes[int] = Lanes(lambda item, _: item in waiting)
    lanes.push("s0", (1.0, 1, 0), 1)
    assert lanes.first(frozenset({"s0"})) is None
    waiting.discard(1)
    assert lanes.first(frozenset()) is None
    lanes.push("s0", (2.0, 2, 0), 2)
    assert lanes.first(frozenset()) == ((2.0, 2, 0), 2)
