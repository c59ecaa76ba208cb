"""Trajectories that fit a filter, one bounded page at a time.

Owns filters, page tokens and the ways through a shard: by trajectory id (all, those of tasks, those
of labels) or, for trajectories closed since a time, along the change log. The positions stay valid
while the shard changes.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import msgspec

from forge.client.stored.filters import check_filter
from forge.core.errors import InvalidArgument
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.reads.trajectory_filter import fits_header, summary_if_fits
from services.pool.data.summaries import count_turns, turns_of
from services.pool.storage.change_log import (
    ChangeKind,
    change_key,
    changes_after,
    number_before,
    number_of_change_key,
)
from services.pool.storage.groups.labels import before, label_prefixes, labeled_tasks
from services.pool.storage.keys import task_prefix
from services.pool.storage.record_names import describe
from services.pool.storage.records import (
    DamagedRecord,
    Records,
    decode_header,
    open_value,
)
from services.pool.storage.tables import Table

DEFAULT_PAGE, MAX_PAGE = 100, 1000
PAGE_COST = 4096
"""Records looked at for one page, about; a turn of an open trajectory is one as well."""
PAGE_BYTES = 2 << 20
"""Most bytes of summaries on one page, about."""

MAX_KEY_BYTES = 511
"""LMDB's limit."""

_FILTER_HASH_BYTES = 8
_END_OF_TASK = b"\xff" * 8
"""In place of rollout and attempt in a position: the task has no further trajectories."""


class _Token(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The end of a page."""

    shard: str
    filter_hash: bytes
    position: bytes
    """Key after which the next page begins, in the table its query goes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    position: bytes
    trajectory: bytes
    value: bytes | None
    """The trajectory's header as it lies on disk; None for one that is no candidate any more."""


def query(
    records: Records,
    request: pool_pb2.QueryTrajectoriesRequest,
    *,
    shard: str,
    name_damaged: bool = False,
) -> pool_pb2.QueryTrajectoriesResponse:
    """One page. Raises `InvalidArgument` for a wrong filter or token, and `DamagedRecord` for a
    damaged trajectory or index entry unless `name_damaged`."""
    pages = Pages(shard=shard, wanted=check_filter(request.filter))
    size = page_size(request.page_size)
    response = pool_pb2.QueryTrajectoriesResponse()
    cost = size_bytes = 0
    for one in pages.seen(records, request.page_token, name_damaged=name_damaged):
        cost += one.cost
        if one.damaged:
            response.damaged_trajectory_ids.append(one.damaged)
            size_bytes += len(one.damaged)
        if one.summary is not None:
            response.trajectories.append(one.summary)
            size_bytes += one.summary.ByteSize()
        if len(response.trajectories) >= size or cost >= PAGE_COST or size_bytes >= PAGE_BYTES:
            response.next_page_token = pages.token(one.position)
            break
    return response


def page_size(wanted: int) -> int:
    """Most trajectories on a page."""
    return min(wanted or DEFAULT_PAGE, MAX_PAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One record that a page looked at."""

    position: bytes
    """Behind it a page may end."""
    trajectory: bytes
    summary: common_pb2.TrajectorySummary | None = None
    """None if it does not fit, or is damaged."""
    damaged: str = ""
    """Name of a damaged trajectory."""
    cost: int = 1
    """Records that were read."""


class Pages:
    """The trajectories that fit a filter, from a page token on."""

    def __init__(self, *, shard: str, wanted: pool_pb2.TrajectoryFilter, text: str = "") -> None:
        """`text` is another condition: a token is of one filter and one text."""
        self._shard = shard
        self._wanted = wanted
        serialized = wanted.SerializeToString(deterministic=True) + text.encode()
        self._filter_hash = blake2b(serialized, digest_size=_FILTER_HASH_BYTES).digest()

    def seen(self, records: Records, token: str, *, name_damaged: bool) -> Iterator[Seen]:
        """Every record behind the page of `token` that may fit. With `name_damaged` indexes are not
        used, so that a damaged entry hides nothing. Raises as `query`."""
        after = self._position(token)
        for candidate in _candidates(records, self._wanted, after, past_index=name_damaged):
            seen = partial(Seen, position=candidate.position, trajectory=candidate.trajectory)
            try:
                summary, turns = _fitting(records, self._wanted, candidate)
            except DamagedRecord:
                if not name_damaged:
                    raise
                yield seen(damaged=describe(Table.TRAJECTORIES, candidate.trajectory))
            else:
                yield seen(summary=summary, cost=1 + turns)

    def token(self, position: bytes) -> str:
        """The token of a page that ends at a position."""
        token = _Token(shard=self._shard, filter_hash=self._filter_hash, position=position)
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(token)).decode()

    def _position(self, token_text: str) -> bytes:
        if not token_text:
            return b""
        try:
            packed = base64.urlsafe_b64decode(token_text)
            token = msgspec.msgpack.decode(packed, type=_Token)
        except (binascii.Error, ValueError, msgspec.MsgspecError):
            raise InvalidArgument(
                f"page_token {token_text[:80]!r} is not a page_token of this service"
            ) from None
        if token.shard != self._shard:
            raise InvalidArgument(
                f"page_token is of pool shard {token.shard!r}, not of {self._shard!r}"
            )
        if token.filter_hash != self._filter_hash:
            raise InvalidArgument("page_token is of a query with another filter")
        if not 0 < len(token.position) <= MAX_KEY_BYTES or (
            _along_log(self._wanted) and len(token.position) != len(change_key(0))
        ):
            raise InvalidArgument(f"page_token holds no position: {token.position!r:.80}")
        return token.position


def _fitting(
    records: Records, wanted: pool_pb2.TrajectoryFilter, candidate: _Candidate
) -> tuple[common_pb2.TrajectorySummary | None, int]:
    """Returns the summary of a candidate, None if it does not fit, and the number of turns read.
    Raises `DamagedRecord`."""
    trajectory, turns = candidate.trajectory, 0
    if candidate.value is None:
        return None, 0
    header = decode_header(open_value(Table.TRAJECTORIES, trajectory, candidate.value))
    if header.is_open and fits_header(wanted, header, counted=False):
        # Its turns are read for its summary, if for nothing else.
        heads = [head for head, _ in turns_of(records, trajectory)]
        header, turns = count_turns(header, heads), len(heads)
    return summary_if_fits(records, wanted, trajectory, header), turns


def _candidates(
    records: Records, wanted: pool_pb2.TrajectoryFilter, after: bytes, *, past_index: bool
) -> Iterator[_Candidate]:
    """Every trajectory, those of the requested tasks or labels, or those closed since the requested
    time."""
    labels = label_prefixes(wanted)
    if not _along_log(wanted):
        if labels and not wanted.task_ids and not past_index:
            yield from _labeled(records, labels, after)
            return
        for prefix in sorted(map(task_prefix, set(wanted.task_ids))) or [b""]:
            for key, value in records.scan_checksummed(
                Table.TRAJECTORIES, prefix=prefix, after=after
            ):
                yield _Candidate(position=key, trajectory=key, value=value)
        return
    start = (
        number_of_change_key(after) if after else number_before(records, wanted.closed_from_unix_s)
    )
    for number, change in changes_after(records, start):
        # One that has been deleted counts as looked at, too.
        closed = change.kind == ChangeKind.CLOSED
        header = records.get_checksummed(Table.TRAJECTORIES, change.trajectory) if closed else None
        yield _Candidate(position=change_key(number), trajectory=change.trajectory, value=header)


def _labeled(records: Records, labels: Sequence[bytes], after: bytes) -> Iterator[_Candidate]:
    """The trajectories of the tasks with these labels. The end of a task, and a task that lacks a
    label, count as records looked at."""
    task = after[: after.find(b":") + 1]
    start = task if after.endswith(_END_OF_TASK) or not task else before(task)
    for prefix, whole in labeled_tasks(records, labels, after=start):
        if not whole:
            yield _Candidate(position=prefix, trajectory=prefix, value=None)
            continue
        for key, value in records.scan_checksummed(Table.TRAJECTORIES, prefix=prefix, after=after):
            yield _Candidate(position=key, trajectory=key, value=value)
        yield _Candidate(position=prefix + _END_OF_TASK, trajectory=prefix, value=None)


def _along_log(wanted: pool_pb2.TrajectoryFilter) -> bool:
    """Whether a query goes along the change log, not by trajectory id."""
    return wanted.HasField("closed_from_unix_s") and not wanted.task_ids
