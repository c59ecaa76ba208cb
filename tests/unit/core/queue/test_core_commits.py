"""Memory of committed batches."""

from __future__ import annotations

from forge.core.queue.commits import Commits


def test_commit_is_known_by_term_and_number() -> None:
    """A commit that was never made is unknown, under any name."""
    commits = Commits()
    commits.add("batch-3-2", 7)
    commits.add("batch-4-0", 8)
    assert (commits.get("batch-3-2"), commits.get("batch-4-0")) == (7, 8)
    for unknown in ("batch-3-0", "batch-3-3", "batch-5-0", "batch-03-2", "other", ""):
        assert commits.get(unknown) is None


def test_undone_commits_are_unknown() -> None:
    """A rewind undoes the commits of later steps, under any name."""
    commits = Commits()
    for number, name in enumerate(("batch-0-0", "batch-0-1", "x", "batch-0-99999999999999")):
        commits.add(name, number)
    commits.undo_after(1)
    assert [name in commits for name in ("batch-0-0", "batch-0-1")] == [True, True]
    assert [name in commits for name in ("x", "batch-0-99999999999999")] == [False, False]


def test_large_batch_numbers_cost_no_memory() -> None:
    """A trainer may send any number."""
    commits = Commits()
    commits.add("batch-1-999999999999999999", 5)
    commits.add("batch-01-0", 6)
    assert commits.get("batch-1-999999999999999999") == 5
    assert commits.get("batch-01-0") == 6
    assert commits.get("batch-1-0") is None
