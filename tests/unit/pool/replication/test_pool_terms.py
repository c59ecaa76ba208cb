"""Which leadership made a commit: by position alone two replicas may mean different ones."""

from __future__ import annotations

from services.pool.storage import journal
from tests.support.pool.records import make_group, make_turn
from tests.support.pool.replicas import catching_up, linked
from tests.support.pool.store import append, put_groups


async def test_commits_of_an_unrecorded_leadership_are_undone(node):
    """A third replica may have commits of a leader that died unrecorded; the elected leader's
    commits have the same positions: the replica copies everything."""
    a, b, third = node("a"), node("b"), node("third")
    a.lead(term=1)
    put_groups(a.store, *(make_group(f"t{index}", index) for index in range(3)))
    async with linked(a, b) as link:
        await link.reached(a.state().position)
    put_groups(a.store, make_group("never", 3))
    append(a.store, make_turn("t0:0:0", messages_json="never acknowledged"))
    async with linked(a, third) as link:
        await link.reached(a.state().position)
        put_groups(a.store, make_group("neither", 4))
        await link.reached(a.state().position)
    b.lead(term=2)
    for index in range(9):
        append(b.store, make_turn(f"t1:{index}:0"))
    for other in (a, third):
        assert catching_up(b, other).way == "copy"
        async with linked(b, other) as link:
            await link.reached(b.state().position)
        assert other.dump() == b.dump()
        assert catching_up(b, other).way == "journal"


async def test_journal_keeps_the_leaderships_of_its_commits(node, monkeypatch):
    """Not one without commits; a follower has those of its leader."""
    a, b = node("a"), node("b")
    for term in (1, 2):
        a.lead(term=term)
    first = a.state().position
    put_groups(a.store, make_group("t0", 0))
    a.lead(term=3)
    put_groups(a.store, make_group("t1", 1))
    async with linked(a, b) as link:
        await link.reached(a.state().position)
    for one in (a, b):
        assert [one.state().term_at(first + behind) for behind in (1, 2)] == [2, 3]
    monkeypatch.setattr(journal, "JOURNAL_BYTES", 10)
    put_groups(a.store, make_group("t2", 2))
    a.lead(term=4)
    assert [term for term, _ in a.state().terms] == [3, 4]
