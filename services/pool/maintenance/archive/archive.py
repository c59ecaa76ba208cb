"""Archives of settled groups at a URL of fsspec: files, object stores, memory.

    <url>/<shard>-<lineage>/<id>.segment    groups with all their records, compressed
    <url>/<shard>-<lineage>/<id>.entry      its catalogue entry: a digest, then JSON

Owns the format and the order of writes: a segment counts once its entry is there, and the entry is
written after the segment was read back. The id is a digest of the content, so the same work done
again writes the same names, and kill -9 at any moment costs nothing but a segment without an entry.
Deletes nothing from the store: the service frees a group on request, if it has still the archived
digest (`FreeArchivedGroups`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from isal import igzip

from forge.core.errors import DataLoss, InvalidArgument
from forge.core.extras import extras_named
from forge.runtime.files.sync import sync
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.group_digest import group_digest
from services.pool.data.group_transfer import content_page, group_page
from services.pool.data.repair.record_repair import is_whole
from services.pool.maintenance.backup.backup import refuse_half_copy
from services.pool.storage.erasures import is_erased
from services.pool.storage.groups.group_records import intact_state
from services.pool.storage.groups.settled_index import settled_after
from services.pool.storage.keys import LINEAGE_KEY, SHARD_KEY, group_key, task_prefix
from services.pool.storage.records import Records, open_value
from services.pool.storage.tables import Key, Table

SEGMENT_BYTES = 64 << 20
"""Records of one segment, about; a larger group is a segment of its own."""
_SEGMENT, _ENTRY, _UNFINISHED = ".segment", ".entry", ".unfinished"
_ID_BYTES = 16

Stored = tuple[str, bytes, bytes]
"""Table, key and value of a record as it lies on disk."""


class SegmentGroup(msgspec.Struct, frozen=True, array_like=True):
    """One group of a segment."""

    task_id: str
    digest: bytes
    """`group_digest` at the shard."""
    records: list[Stored]

    def record(self) -> common_pb2.GroupRecord:
        """The group without its state. Raises `DataLoss` for a damaged record."""
        for table, key, value in self.records:
            if table == Table.GROUPS.value:
                return common_pb2.GroupRecord.FromString(
                    bytes(open_value(Table.GROUPS, key, value))
                )
        raise DataLoss(f"the archive lacks the record of group {self.task_id}")


class SegmentEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The catalogue entry of a segment."""

    segment_id: str
    digest: str
    """Digest of the file."""
    size_bytes: int
    archived_unix_s: float
    groups: dict[str, str]
    """Digest of each group, by task."""


@dataclass(slots=True, kw_only=True)
class Archived:
    """The result of one run."""

    groups: int = 0
    known: int = 0
    """Groups that were in the archive already."""
    segments: int = 0
    size_bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    """Tasks of groups with a damaged record, which are left out."""


class Archive:
    """The segments of one store."""

    def __init__(self, files: Any, folder: str) -> None:
        self._files = files
        self.folder = folder

    def entries(self, *, past_damage: bool = False) -> list[SegmentEntry]:
        """The catalogue, oldest first. Raises `DataLoss` for a damaged entry, or skips it."""
        found = []
        for path in sorted(self._names(_ENTRY)):
            digest, _, content = self._files.cat_file(path).partition(b"\n")
            if digest == _digest(content).encode():
                found.append(msgspec.json.decode(content, type=SegmentEntry))
            elif not past_damage:
                raise DataLoss(
                    f"catalogue entry {path} is damaged: delete it, and archive again if the shard "
                    "still has its groups"
                )
        return sorted(found, key=lambda entry: (entry.archived_unix_s, entry.segment_id))

    def groups(self, entry: SegmentEntry) -> Iterator[SegmentGroup]:
        """The groups of a segment. Raises `DataLoss` if it is damaged or absent."""
        path = self._path(entry.segment_id, _SEGMENT)
        try:
            packed = self._files.cat_file(path)
        except FileNotFoundError:
            raise DataLoss(
                f"segment {path} is missing, although the catalogue has its entry"
            ) from None
        if _digest(packed) != entry.digest:
            raise DataLoss(f"segment {path} is damaged: its digest does not match")
        content: bytes = igzip.decompress(packed)  # type: ignore[no-untyped-call]
        yield from msgspec.msgpack.decode(content, type=list[SegmentGroup])

    def add(self, groups: Sequence[SegmentGroup], *, archived_unix_s: float) -> SegmentEntry:
        """Writes a segment, reads it back, then writes its entry."""
        content = msgspec.msgpack.encode(list(groups))
        packed = igzip.compress(content, mtime=0)
        entry = SegmentEntry(
            segment_id=blake2b(content, digest_size=_ID_BYTES).hexdigest(),
            digest=_digest(packed),
            size_bytes=len(packed),
            archived_unix_s=archived_unix_s,
            groups={group.task_id: group.digest.hex() for group in groups},
        )
        self._make_folder()
        self._write(self._path(entry.segment_id, _SEGMENT), packed)
        for _ in self.groups(entry):
            pass
        catalogued = msgspec.json.encode(entry)
        self._write(
            self._path(entry.segment_id, _ENTRY), _digest(catalogued).encode() + b"\n" + catalogued
        )
        return entry

    def _write(self, path: str, data: bytes) -> None:
        """Writes a file that has its name once it is complete, and is on disk at the end: the shard
        may free its groups next. Object stores confirm a write once it is durable."""
        unfinished = path + _UNFINISHED
        self._files.pipe_file(unfinished, data)
        if self._is_local:
            with Path(unfinished).open("rb") as file:
                os.fsync(file.fileno())
        self._files.mv(unfinished, path)
        if self._is_local:
            sync(Path(self.folder))

    def _make_folder(self) -> None:
        if self._files.exists(self.folder):
            return
        self._files.makedirs(self.folder, exist_ok=True)
        for parent in Path(self.folder).parents if self._is_local else ():
            sync(parent)

    @property
    def _is_local(self) -> bool:
        protocol: str | Sequence[str] = self._files.protocol
        return "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def remove(self, entry: SegmentEntry) -> None:
        """Deletes a segment: first its entry."""
        for suffix in (_ENTRY, _SEGMENT):
            path = self._path(entry.segment_id, suffix)
            if self._files.exists(path):
                self._files.rm_file(path)

    def remove_strays(self) -> None:
        """Deletes the segments without an entry, and the unfinished files, of killed runs."""
        for path in self._names(_UNFINISHED):
            self._files.rm_file(path)
        entries = {path[: -len(_ENTRY)] for path in self._names(_ENTRY)}
        for path in self._names(_SEGMENT):
            if path[: -len(_SEGMENT)] not in entries:
                self._files.rm_file(path)

    def _names(self, suffix: str) -> list[str]:
        if not self._files.exists(self.folder):
            return []
        return [path for path in self._files.find(self.folder) if path.endswith(suffix)]

    def _path(self, segment_id: str, suffix: str) -> str:
        return f"{self.folder}/{segment_id}{suffix}"


def open_url(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it. Raises `ConfigError` without fsspec or a package
    of the protocol."""
    with extras_named("archive"):
        import fsspec

        try:
            files, path = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise InvalidArgument(f"{url} cannot be opened: {error}") from None
    return files, path.rstrip("/")


def archives_at(url: str) -> list[Archive]:
    """The archives below a URL, one per store."""
    files, root = open_url(url)
    if not files.exists(root):
        return []
    # Also a folder of strays alone: an erasure that was killed may have left erased records there.
    folders = {
        path.rpartition("/")[0]
        for path in files.find(root)
        if path.endswith((_ENTRY, _SEGMENT, _UNFINISHED))
    }
    return [Archive(files, folder) for folder in sorted(folders)]


def archive_settled(
    records: Records, url: str, *, settled_before_unix_s: float, progress: Callable[[int], None]
) -> Archived:
    """Writes the groups that were settled before a time and are not in the archive as they are.
    `progress` receives the number of groups so far. Raises `HalfCopy` for a replica that catches
    up."""
    refuse_half_copy(records)
    archive = _archive_of(records, url)
    known = {
        task_id: digest
        for entry in archive.entries(past_damage=True)
        for task_id, digest in entry.groups.items()
    }
    result = Archived()
    pending: list[SegmentGroup] = []
    size_bytes = 0
    for group in _unarchived(records, known, settled_before_unix_s, result):
        pending.append(group)
        size_bytes += sum(len(value) for _, _, value in group.records)
        result.groups += 1
        progress(result.groups)
        if size_bytes >= SEGMENT_BYTES:
            _flush(archive, pending, result)
            size_bytes = 0
    _flush(archive, pending, result)
    return result


def _unarchived(
    records: Records, known: Mapping[str, str], settled_before_unix_s: float, result: Archived
) -> Iterator[SegmentGroup]:
    """The settled groups that are not in the archive as they are; `known` has the digests of those
    in it. Counts the others in `result`."""
    for found in settled_after(records, b""):
        if found.damaged:
            result.damaged.append("of an unreadable entry of the table settled")
            continue
        if found.settled_unix_s >= settled_before_unix_s:
            break
        state = intact_state(records, found.task_id)
        if state is not None and state.freed_unix_s:
            continue
        digest = group_digest(records, found.task_id)
        if not digest or is_erased(records, found.task_id):
            continue
        if known.get(found.task_id) == digest.hex():
            result.known += 1
            continue
        group = _group(records, found.task_id, digest)
        if group is None:
            result.damaged.append(found.task_id)
            continue
        yield group


def freeable(records: Records, url: str, *, settled_before_unix_s: float) -> dict[str, bytes]:
    """The groups that were settled before a time and are in the archive as they are, each with its
    digest; also those that are freed in part. Reads every segment that has one. Raises `DataLoss`
    for a damaged segment."""
    archive = _archive_of(records, url)
    newest = {task_id: entry for entry in archive.entries() for task_id in entry.groups}
    found: dict[str, bytes] = {}
    segments: dict[str, SegmentEntry] = {}
    for group in settled_after(records, b""):
        entry = newest.get(group.task_id)
        if group.damaged or entry is None or group.settled_unix_s >= settled_before_unix_s:
            continue
        state = intact_state(records, group.task_id)
        digest = bytes.fromhex(entry.groups[group.task_id])
        if state is None or not (
            state.freed_unix_s or group_digest(records, group.task_id) == digest
        ):
            continue
        found[group.task_id] = digest
        segments[entry.segment_id] = entry
    for entry in segments.values():
        for _ in archive.groups(entry):
            pass
    return found


def _archive_of(records: Records, url: str) -> Archive:
    files, root = open_url(url)
    name = f"{records.meta_text(SHARD_KEY)}-{records.meta_text(LINEAGE_KEY)[:12]}"
    return Archive(files, f"{root}/{name}")


def _flush(archive: Archive, pending: list[SegmentGroup], result: Archived) -> None:
    if pending:
        entry = archive.add(pending, archived_unix_s=time.time())
        result.segments += 1
        result.size_bytes += entry.size_bytes
        pending.clear()


def _group(records: Records, task_id: str, digest: bytes) -> SegmentGroup | None:
    """A group with its records; None if one of them is damaged or missing."""
    units: list[Key] = [(Table.GROUPS, group_key(task_id))]
    units += [
        (Table.TRAJECTORIES, key)
        for key in records.keys(Table.TRAJECTORIES, prefix=task_prefix(task_id))
    ]
    if not all(is_whole(records, unit) for unit in units):
        return None
    page = content_page(records, task_id, after=None, limit_bytes=1 << 62)
    stored = [
        (table.value, key, value) for (table, key), value in (*page, *group_page(records, task_id))
    ]
    return SegmentGroup(task_id, digest, stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasedInArchive:
    """The result of an erasure."""

    groups: int
    segments: int
    """Segments that were rewritten."""


def erase_in_archives(url: str, request: pool_pb2.EraseTrajectoriesRequest) -> ErasedInArchive:
    """Rewrites every segment below a URL that has a group of these tasks, user or tag, without it.

    The new segment is complete before the old one goes, so the command may be killed and repeated.
    """
    erased = segments = 0
    for archive in archives_at(url):
        for entry in archive.entries():
            if request.task_ids and not entry.groups.keys() & set(request.task_ids):
                continue
            groups = list(archive.groups(entry))
            kept = [group for group in groups if not _is_wanted(group, request)]
            if len(kept) == len(groups):
                continue
            if kept:
                archive.add(kept, archived_unix_s=entry.archived_unix_s)
            archive.remove(entry)
            erased += len(groups) - len(kept)
            segments += 1
        archive.remove_strays()
    return ErasedInArchive(groups=erased, segments=segments)


def _is_wanted(group: SegmentGroup, request: pool_pb2.EraseTrajectoriesRequest) -> bool:
    if request.task_ids:
        return group.task_id in request.task_ids
    task = group.record().task
    return bool(request.user and task.user == request.user) or bool(
        request.tag and task.tag == request.tag
    )


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=32).hexdigest()
