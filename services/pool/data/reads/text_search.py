"""Search for a text in the recorded messages of trajectories, page by page.

Owns the search in a turn and the bound of a page. There is no index of texts: every trajectory that
fits the filter is read, so that an answer is complete when its last page is. A turn's texts are all
strings of its `messages_json`: contents, reasoning, names and arguments of calls, and the bodies of
external APIs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from forge.client.stored.filters import check_filter
from forge.core.errors import InvalidArgument
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.reads.query import PAGE_BYTES, PAGE_COST, Pages, page_size
from services.pool.data.summaries import turns_of
from services.pool.storage.record_names import describe
from services.pool.storage.records import DamagedRecord, Records, turn_of_payload
from services.pool.storage.tables import Table

MAX_TEXT = 1000
"""Most characters of a text."""
SEARCHED_BYTES = 16 << 20
"""Bytes of turns that are read for one page, about: it ends behind the trajectory that passes
them."""
AROUND = 80
"""Characters before and behind the text in an excerpt."""

_Match = pool_pb2.SearchTrajectoriesResponse.Match


def search(
    records: Records,
    request: pool_pb2.SearchTrajectoriesRequest,
    *,
    shard: str,
    name_damaged: bool = False,
) -> pool_pb2.SearchTrajectoriesResponse:
    """One page. Raises `InvalidArgument` for a wrong filter, text or token, and `DamagedRecord` for
    a damaged record unless `name_damaged`."""
    if not 0 < len(request.text) <= MAX_TEXT:
        raise InvalidArgument(f"text has {len(request.text)} characters, must have 1 to {MAX_TEXT}")
    pages = Pages(shard=shard, wanted=check_filter(request.filter), text=request.text)
    size = page_size(request.page_size)
    response = pool_pb2.SearchTrajectoriesResponse()
    looking = _Search(records, request.text)
    cost = size_bytes = 0
    for one in pages.seen(records, request.page_token, name_damaged=name_damaged):
        cost += one.cost
        damaged = one.damaged
        if one.summary is not None and one.summary.freed:
            response.freed_trajectories += 1
        elif one.summary is not None:
            try:
                match = looking.match(one.trajectory, one.summary)
            except DamagedRecord:
                if not name_damaged:
                    raise
                damaged = describe(Table.TRAJECTORIES, one.trajectory)
            else:
                if match is not None:
                    response.matches.append(match)
                    size_bytes += match.ByteSize()
        if damaged:
            response.damaged_trajectory_ids.append(damaged)
            size_bytes += len(damaged)
        if (
            len(response.matches) >= size
            or cost >= PAGE_COST
            or size_bytes >= PAGE_BYTES
            or looking.read_bytes >= SEARCHED_BYTES
        ):
            response.next_page_token = pages.token(one.position)
            break
    response.turns_without_text = looking.without_text
    return response


class _Search:
    """The search of one page."""

    def __init__(self, records: Records, text: str) -> None:
        self._records = records
        self._text = text.casefold()
        self.read_bytes = 0
        self.without_text = 0
        """Turns without messages on record."""

    def match(self, trajectory: bytes, summary: common_pb2.TrajectorySummary) -> _Match | None:
        """Returns the first turn with the text; None without one. Raises `DamagedRecord`."""
        for head, payload in turns_of(self._records, trajectory):
            self.read_bytes += len(payload)
            turn = common_pb2.Turn.FromString(bytes(turn_of_payload(payload)))
            if not turn.messages_json:
                self.without_text += 1
            for text in _texts(turn.messages_json):
                folded = text.casefold()
                at = folded.find(self._text)
                if at >= 0:
                    # Folding makes some characters two.
                    shown = text if len(text) == len(folded) else folded
                    excerpt = shown[max(0, at - AROUND) : at + len(self._text) + AROUND]
                    return _Match(trajectory=summary, turn_index=head.turn_index, excerpt=excerpt)
        return None


def _texts(messages_json: str) -> Iterator[str]:
    """Every string of a record, without keys; the record itself if it is no JSON."""
    try:
        yield from _strings(msgspec.json.decode(messages_json)) if messages_json else ()
    except (msgspec.MsgspecError, RecursionError):
        yield messages_json


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
