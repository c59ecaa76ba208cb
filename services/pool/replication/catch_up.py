"""Catch-up of a follower: pages of the records that it lacks.

Owns the order of pages. `storage.journal` makes a page, `follower_link` sends it.
"""

from __future__ import annotations

from forge.v1 import replica_pb2 as pb
from services.pool.storage.journal import (
    ReplicaState,
    all_records,
    can_catch_up,
    can_continue_copy,
    keys_changed,
    present_values,
)
from services.pool.storage.records import Records


class CatchUp:
    """The records that a follower lacks, page by page; each page is a snapshot of its own.

    A page may be newer than commits sent after it. The follower applies them anyway, in order:
    after the commit that the newest page shows, it equals the leader at that commit. So no snapshot
    is long, and the writer never waits.
    """

    def __init__(self, state: ReplicaState, follower: pb.FollowerState, *, term: int) -> None:
        """`state` was read after the link began to collect commits, under leadership `term`."""
        self.reached = state.position
        """Position that the newest page shows."""
        self._term = term
        self._keys: list[pb.RecordKey] = []
        self._next = self._end = state.position
        """The journal is read from the one to the other."""
        self._copying = not can_catch_up(state, follower)
        self._after: pb.RecordKey | None = None
        """The last that was copied."""
        self.way = "copy"
        """A `copy` of all records, the `rest` of an interrupted one, or by the `journal`."""
        if not self._copying:
            self.way = "journal"
            self._keys, self._next = list(follower.touched), follower.agreed_position
        elif can_continue_copy(state, follower, term=term):
            self.way = "rest"
            self._next, self._after = follower.copied.complete_position, follower.copied.last

    def begin(self, lineage: str) -> pb.FollowStep:
        """Returns the first step for the follower."""
        return pb.FollowStep(
            begin=pb.FollowBegin(
                lineage=lineage,
                from_scratch=self.way == "copy",
                continues_copy=self.way == "rest",
            )
        )

    def page(self, records: Records, *, sent: int) -> pb.FollowStep | None:
        """None at the end. Every commit up to `sent` has been sent.

        Raises `FailedPrecondition` if the journal was cut off.
        """
        if self._keys or self._next < self._end:
            page = self._changed(records)
        elif self._copying:
            page = self._copied(records, sent)
        else:
            return None
        self.reached = max(self.reached, page.position)
        return pb.FollowStep(copy=page)

    def _changed(self, records: Records) -> pb.RecordChanges:
        if not self._keys:
            self._keys, self._next = keys_changed(records, after=self._next, up_to=self._end)
        page, taken = present_values(records, self._keys)
        self._keys = self._keys[taken:]
        return page

    def _copied(self, records: Records, sent: int) -> pb.RecordChanges:
        page, self._copying = all_records(records, after=self._after)
        if self._copying:
            self._after = page.changes[-1].record
            page.copied.CopyFrom(
                pb.CopyProgress(term=self._term, last=self._after, complete_position=sent)
            )
        return page
