"""Trajectories that fit a filter, one bounded page at a time.

Owns filters, page tokens and the two ways through a shard: by trajectory id or, for trajectories
closed since a time, along the change log. Both positions stay valid while the shard changes.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from forge.core.errors import InvalidArgument
from forge.core.trajectory import check_task_id
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.summaries import count_turns, summary_of, turns_of
from services.pool.storage.change_log import (
    ChangeKind,
    change_key,
    changes_after,
    number_before,
    number_of_change_key,
)
from services.pool.storage.keys import name_of_trajectory_key, task_prefix
from services.pool.storage.moved_groups import is_moved
from services.pool.storage.record_names import describe
from services.pool.storage.records import (
    DamagedRecord,
    Records,
    TrajectoryHeader,
    decode_header,
    open_value,
)
from services.pool.storage.tables import Table

DEFAULT_PAGE, MAX_PAGE = 100, 1000
PAGE_COST = 4096
"""Records looked at for one page, about; a turn of an open trajectory is one as well."""
MAX_TASKS = 1000
"""Most tasks of a filter."""
PAGE_BYTES = 2 << 20
"""Most bytes of summaries on one page, about."""

MAX_KEY_BYTES = 511
"""LMDB's limit."""

_FILTER_HASH_BYTES = 8


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
    """Its header as it lies on disk; None for one that is no candidate any more."""


def check_filter(wanted: pool_pb2.TrajectoryFilter) -> pool_pb2.TrajectoryFilter:
    """Returns `wanted`; raises `InvalidArgument` if nothing can fit it."""
    if wanted.state not in common_pb2.TrajectoryState.values():
        raise InvalidArgument(f"filter.state {wanted.state} is unknown")
    if len(wanted.task_ids) > MAX_TASKS:
        raise InvalidArgument(f"filter.task_ids has {len(wanted.task_ids)}, at most {MAX_TASKS}")
    for task_id in wanted.task_ids:
        check_task_id(task_id)
    for low, high in (
        ("min_reward", "max_reward"),
        ("min_weight_version", "max_weight_version"),
        ("closed_from_unix_s", "closed_before_unix_s"),
    ):
        bounds = [
            (name, getattr(wanted, name))
            for name in (low, high)
            if wanted.HasField(name)  # type: ignore[arg-type]
        ]
        for name, value in bounds:
            if value != value:
                raise InvalidArgument(f"filter.{name} is no number")
        if len(bounds) == 2 and bounds[0][1] > bounds[1][1]:
            raise InvalidArgument(
                f"filter.{low} {bounds[0][1]:g} is above filter.{high} {bounds[1][1]:g}"
            )
    if wanted.state == common_pb2.TRAJECTORY_STATE_OPEN:
        for name in ("domain", "closed_from_unix_s", "closed_before_unix_s"):
            if any(field.name == name for field, _ in wanted.ListFields()):
                raise InvalidArgument(f"filter.{name} is set, which no open trajectory has")
    return wanted


def query(
    records: Records,
    request: pool_pb2.QueryTrajectoriesRequest,
    *,
    shard: str,
    name_damaged: bool = False,
) -> pool_pb2.QueryTrajectoriesResponse:
    """One page. Raises `InvalidArgument` for a wrong filter or token, and `DamagedRecord` for a
    damaged trajectory unless `name_damaged`."""
    wanted = check_filter(request.filter)
    size = min(request.page_size or DEFAULT_PAGE, MAX_PAGE)
    response = pool_pb2.QueryTrajectoriesResponse()
    position = _position(request, shard)
    cost = size_bytes = 0
    for candidate in _candidates(records, wanted, position):
        position = candidate.position
        cost += 1
        try:
            summary, turns = _fitting(records, wanted, candidate)
        except DamagedRecord:
            if not name_damaged:
                raise
            name = describe(Table.TRAJECTORIES, candidate.trajectory)
            response.damaged_trajectory_ids.append(name)
            summary, turns = None, 0
            size_bytes += len(name)
        cost += turns
        if summary is not None:
            response.trajectories.append(summary)
            size_bytes += summary.ByteSize()
        if len(response.trajectories) >= size or cost >= PAGE_COST or size_bytes >= PAGE_BYTES:
            token = _Token(shard=shard, filter_hash=_hash(wanted), position=position)
            packed = msgspec.msgpack.encode(token)
            response.next_page_token = base64.urlsafe_b64encode(packed).decode()
            break
    return response


def _fitting(
    records: Records, wanted: pool_pb2.TrajectoryFilter, candidate: _Candidate
) -> tuple[common_pb2.TrajectorySummary | None, int]:
    """Its summary, None if it does not fit, and the number of turns read. Raises
    `DamagedRecord`."""
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
    records: Records, wanted: pool_pb2.TrajectoryFilter, after: bytes
) -> Iterator[_Candidate]:
    """Every trajectory, those of the requested tasks, or those closed since the requested time."""
    if not _along_log(wanted):
        for prefix in sorted(map(task_prefix, set(wanted.task_ids))) or [b""]:
            for key, value in records.scan_sealed(Table.TRAJECTORIES, prefix=prefix, after=after):
                yield _Candidate(position=key, trajectory=key, value=value)
        return
    start = (
        number_of_change_key(after) if after else number_before(records, wanted.closed_from_unix_s)
    )
    for number, change in changes_after(records, start):
        # One that has been deleted counts as looked at, too.
        closed = change.kind == ChangeKind.CLOSED
        header = records.get_sealed(Table.TRAJECTORIES, change.trajectory) if closed else None
        yield _Candidate(position=change_key(number), trajectory=change.trajectory, value=header)


def _along_log(wanted: pool_pb2.TrajectoryFilter) -> bool:
    """Whether a query goes along the change log, not by trajectory id."""
    return wanted.HasField("closed_from_unix_s") and not wanted.task_ids


def summary_if_fits(
    records: Records,
    wanted: pool_pb2.TrajectoryFilter,
    trajectory: bytes,
    header: TrajectoryHeader,
) -> common_pb2.TrajectorySummary | None:
    """None if it does not fit, and if its group moved to another shard; the turns of an open one
    are counted in `header`."""
    name = name_of_trajectory_key(trajectory)
    if wanted.task_ids and name.task_id not in wanted.task_ids:
        return None
    if not fits_header(wanted, header) or is_moved(records, name.task_id):
        return None
    summary = summary_of(records, name, header)
    return summary if _fits_rewards(wanted, summary) else None


def fits_header(
    wanted: pool_pb2.TrajectoryFilter, header: TrajectoryHeader, *, counted: bool = True
) -> bool:
    """Whether a header fits; without `counted`, its counts are ignored."""
    if wanted.state and header.state != wanted.state:
        return False
    if wanted.domain and header.domain != wanted.domain:
        return False
    if wanted.HasField("closed_from_unix_s") and (
        header.is_open or header.sealed_unix_s < wanted.closed_from_unix_s
    ):
        return False
    if wanted.HasField("closed_before_unix_s") and (
        header.is_open or header.sealed_unix_s >= wanted.closed_before_unix_s
    ):
        return False
    return not counted or _fits_versions(wanted, header)


def _fits_versions(wanted: pool_pb2.TrajectoryFilter, header: TrajectoryHeader) -> bool:
    low = wanted.min_weight_version if wanted.HasField("min_weight_version") else -math.inf
    high = wanted.max_weight_version if wanted.HasField("max_weight_version") else math.inf
    if header.sampled_tokens == 0:
        return low == -math.inf and high == math.inf
    return low <= header.max_weight_version and header.min_weight_version <= high


def _fits_rewards(wanted: pool_pb2.TrajectoryFilter, summary: common_pb2.TrajectorySummary) -> bool:
    if not (wanted.HasField("min_reward") or wanted.HasField("max_reward")):
        return True
    name = wanted.reward_name
    values = [
        reward.value
        for reward in summary.rewards
        if (reward.name == name if name else reward.kind == common_pb2.REWARD_KIND_OUTCOME)
    ]
    low = wanted.min_reward if wanted.HasField("min_reward") else -math.inf
    high = wanted.max_reward if wanted.HasField("max_reward") else math.inf
    return bool(values) and low <= sum(values) <= high


def _position(request: pool_pb2.QueryTrajectoriesRequest, shard: str) -> bytes:
    if not request.page_token:
        return b""
    try:
        packed = base64.urlsafe_b64decode(request.page_token)
        token = msgspec.msgpack.decode(packed, type=_Token)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise InvalidArgument(
            f"page_token {request.page_token[:80]!r} is none that this service gave"
        ) from None
    if token.shard != shard:
        raise InvalidArgument(f"page_token is of pool shard {token.shard!r}, not of {shard!r}")
    if token.filter_hash != _hash(request.filter):
        raise InvalidArgument("page_token is of a query with another filter")
    if not 0 < len(token.position) <= MAX_KEY_BYTES or (
        _along_log(request.filter) and len(token.position) != len(change_key(0))
    ):
        raise InvalidArgument(f"page_token holds no position: {token.position!r:.80}")
    return token.position


def _hash(wanted: pool_pb2.TrajectoryFilter) -> bytes:
    serialized = wanted.SerializeToString(deterministic=True)
    return blake2b(serialized, digest_size=_FILTER_HASH_BYTES).digest()
