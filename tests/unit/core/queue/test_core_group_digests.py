"""What is kept of groups and batches that are over."""

from __future__ import annotations

from forge.core.queue.commits import Commits
from forge.core.queue.group_digests import Forgotten


def test_forgotten_names_are_found_with_their_content() -> None:
    """Each of many, and none of those that were not added."""
    forgotten = Forgotten()
    for number in range(20_000):
        forgotten.add(f"task-{number}", number.to_bytes(16, "little"))
    assert len(forgotten) == 20_000
    for number in range(20_000):
        assert forgotten.content(f"task-{number}") == number.to_bytes(8, "little")
        assert f"other-{number}" not in forgotten


def test_forgotten_name_takes_24_bytes() -> None:
    """However long it is, and however often it is forgotten."""
    forgotten = Forgotten()
    for _ in range(3):
        forgotten.add("task" * 100, b"content of a task")
    assert forgotten.size_bytes() == 24
    assert forgotten.content("task" * 100) == b"content "


def test_commit_is_known_by_term_and_number() -> None:
    """Those that were never made are not, whatever their names."""
    commits = Commits()
    commits.add("batch-3-2", 7)
    commits.add("batch-4-0", 8)
    assert (commits.get("batch-3-2"), commits.get("batch-4-0")) == (7, 8)
    for unknown in ("batch-3-0", "batch-3-3", "batch-5-0", "batch-03-2", "other", ""):
        assert commits.get(unknown) is None


def test_undone_commits_are_not_known() -> None:
    """A rewind takes back those of later steps, under whatever name."""
    commits = Commits()
    for number, name in enumerate(("batch-0-0", "batch-0-1", "x", "batch-0-99999999999999")):
        commits.add(name, number)
    commits.undo_after(1)
    assert [name in commits for name in ("batch-0-0", "batch-0-1")] == [True, True]
    assert [name in commits for name in ("x", "batch-0-99999999999999")] == [False, False]


def test_name_of_a_batch_takes_no_memory_by_its_number() -> None:
    """A trainer may send any."""
    commits = Commits()
    commits.add("batch-1-999999999999999999", 5)
    commits.add("batch-01-0", 6)
    assert commits.get("batch-1-999999999999999999") == 5
    assert commits.get("batch-01-0") == 6
    assert commits.get("batch-1-0") is None
