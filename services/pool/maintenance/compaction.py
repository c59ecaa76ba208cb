"""Compaction of a served shard: its file is rewritten without free pages.

Another process makes the copy (see `backup`). Meanwhile the keys of changed records are
logged; their present values go into the copy round by round, until writers wait for the last few
and the exchange no longer than for a commit. Until then the shard is unchanged: any failure, or a
kill, costs the copy alone.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from forge.core.errors import DataLoss, FailedPrecondition, ResourceExhausted, Unavailable
from forge.runtime.concurrency import child_start
from forge.runtime.process.child_processes import dying_with_parent
from forge.runtime.telemetry import log
from forge.v1 import pool_pb2
from services.pool.maintenance.backup.backup import room
from services.pool.metrics import COMPACTIONS
from services.pool.storage.change_trackers import CompactionLog
from services.pool.storage.environment.file_locks import (
    DATA,
    compacted,
    data_locked,
    drop_compacted,
    file_bytes,
    unfinished,
)
from services.pool.storage.environment.lmdb_env import Environment
from services.pool.storage.records import Records
from services.pool.storage.tables import Key, Table

NOTED_BYTES = 64 << 20
"""Most bytes of keys that may change during the copy."""
CHUNK_BYTES = 8 << 20
"""Bytes of records per transaction of the copy."""
FEW_RECORDS = 256
"""Writers wait for at most these and the records changed meanwhile."""
ROUNDS = 20
TOOLS_S = 30.0
"""Longest wait for readers of the file, such as a backup."""
PROGRESS_S = 0.5


class Compactor:
    """Compacts one open shard, once at a time."""

    def __init__(self, environment: Environment, *, reserve_bytes: int) -> None:
        """`reserve_bytes` of the disk are left to the shard."""
        self._environment = environment
        self._reserve_bytes = reserve_bytes
        self._directory = environment.directory
        self._copy_directory = compacted(environment.directory)
        self._purge = False
        self._task: asyncio.Task[None] | None = None
        self._stopped = threading.Event()

    async def run(
        self, data_dir: str, *, purge: bool = False
    ) -> AsyncGenerator[pool_pb2.CompactShardResponse]:
        """Compacts the shard and yields its progress; gives up when the generator is closed.
        `purge`: the new file has no byte of deleted records.

        Raises `FailedPrecondition` while another compaction runs, while a process keeps reading the
        file, or if it is not in `data_dir`; `ResourceExhausted` if the copy has no room, or cannot
        keep up with writes.
        """
        if self._task is not None:
            raise FailedPrecondition("the shard is being compacted already")
        if data_dir not in ("", str(self._directory.resolve())):
            raise FailedPrecondition(
                f"the instance that serves the shard has it in {self._directory.resolve()}, not in "
                f"{data_dir}: a follower is compacted while it is stopped, or once it leads"
            )
        before_bytes, total_bytes = self._sizes()
        self._stopped.clear()
        self._purge = purge
        task = self._task = asyncio.create_task(self._compact(), name="compaction")
        try:
            while not task.done():
                yield pool_pb2.CompactShardResponse(
                    copied_bytes=min(self._copied_bytes(), total_bytes), total_bytes=total_bytes
                )
                await asyncio.wait({task}, timeout=PROGRESS_S)
            if task.cancelled():
                raise Unavailable(
                    "the pool instance drains: compact the shard when it serves again"
                )
            task.result()
            after_bytes = file_bytes(self._directory / DATA)
            COMPACTIONS.inc()
            log.info("shard_compacted", before_bytes=before_bytes, after_bytes=after_bytes)
            yield pool_pb2.CompactShardResponse(
                copied_bytes=total_bytes,
                total_bytes=total_bytes,
                before_bytes=before_bytes,
                after_bytes=after_bytes,
                data_dir=str(self._directory.resolve()),
            )
        finally:
            await self.stop()

    def give_up(self) -> None:
        """Ends a compaction in progress; the shard is unchanged unless the exchange was made."""
        if self._task is not None and not self._task.cancelling():
            self._task.cancel()

    async def stop(self) -> None:
        """Gives up, and returns once the compaction has ended."""
        if self._task is not None:
            self.give_up()
            await asyncio.wait({self._task})
            self._task = None

    def _sizes(self) -> tuple[int, int]:
        """Bytes of the file and, about, of the copy. Raises `ResourceExhausted` if that has no
        room."""
        copy_bytes, free_bytes = self._environment.live_bytes, self._environment.disk_free_bytes
        if free_bytes < copy_bytes + self._reserve_bytes:
            raise ResourceExhausted(
                f"{self._directory} has {free_bytes} bytes free on its disk; a copy of "
                f"the pages in use takes {copy_bytes}, and {self._reserve_bytes} stay in reserve"
            )
        return file_bytes(self._directory / DATA), copy_bytes

    def _copied_bytes(self) -> int:
        copy = self._copy_directory
        return file_bytes(unfinished(copy) / DATA) or file_bytes(copy / DATA)

    async def _compact(self) -> None:
        environment = self._environment
        await asyncio.to_thread(environment.start_compaction_log, NOTED_BYTES)
        try:
            # Fails at once if another process reads the file.
            with data_locked(self._directory):
                pass
            await self._copy()
            await self._on_thread()
        finally:
            await asyncio.to_thread(self._clean)

    async def _copy(self) -> None:
        command = [sys.executable, "-m", "services.pool.maintenance", "backup"]
        command += ["--purge"] if self._purge else []
        process = await child_start.start(
            *dying_with_parent([*command, str(self._directory), str(self._copy_directory)]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            _, stderr = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if process.returncode:
            said = stderr.decode(errors="replace").strip().splitlines()
            why = said[-1].removeprefix("forge: ") if said else f"exit code {process.returncode}"
            raise ResourceExhausted(f"the copy could not be made: {why}")

    async def _on_thread(self) -> None:
        """`_finish` on a thread; waits for its end when cancelled."""
        finishing = asyncio.ensure_future(asyncio.to_thread(self._finish))
        try:
            await asyncio.shield(finishing)
        except asyncio.CancelledError:
            self._stopped.set()
            await asyncio.wait({finishing})
            raise

    def _finish(self) -> None:
        environment = self._environment
        with room():
            copy = Environment(
                self._copy_directory,
                map_bytes=1 << 20,
                map_max_bytes=environment.map_max_bytes,
                max_readers=1,
            )
            try:
                with data_locked(self._directory, wait_s=TOOLS_S, stopped=self._stopped):
                    for _ in range(ROUNDS):
                        if self._bring_in(copy, environment.take_compaction_log()) <= FEW_RECORDS:
                            break
                    else:
                        raise ResourceExhausted(
                            "writes arrive faster than compaction copies them; retry under less "
                            "load"
                        )
                    environment.exchange(copy, partial(self._bring_in_last, copy))
            finally:
                copy.close()

    def _bring_in(self, copy: Environment, log: CompactionLog) -> int:
        """Updates the records of `log` in the copy; how many there were."""
        if log.lost:
            raise ResourceExhausted(f"{log.lost} during the copy: try again under lower load")
        keys = list(log.keys)
        done = 0
        while done < len(keys):
            if self._stopped.is_set():
                raise Unavailable("the caller cancelled the compaction")
            values = self._environment.read(partial(_present, keys=keys, start=done))
            copy.write(partial(_store, keys=keys[done : done + len(values)], values=values))
            done += len(values)
        return len(keys)

    def _bring_in_last(self, copy: Environment, log: CompactionLog) -> None:
        self._bring_in(copy, log)
        counts = [one.read(_counts) for one in (self._environment, copy)]
        if counts[0] != counts[1]:
            raise DataLoss(f"the copy has {counts[1]} records, not {counts[0]}; it is deleted")

    def _clean(self) -> None:
        self._environment.stop_compaction_log()
        drop_compacted(self._directory)


def _present(records: Records, *, keys: Sequence[Key], start: int) -> list[bytes | None]:
    """The records of `keys` from `start` on, about a chunk; None for absent ones."""
    values: list[bytes | None] = []
    size_bytes = 0
    for index in range(start, len(keys)):
        table, key = keys[index]
        value = records.get_checksummed(table, key)
        values.append(value)
        size_bytes += len(key) + len(value or b"")
        if size_bytes >= CHUNK_BYTES:
            break
    return values


def _store(records: Records, *, keys: Sequence[Key], values: Sequence[bytes | None]) -> None:
    for (table, key), value in zip(keys, values, strict=True):
        records.put_checksummed(table, key, value)


def _counts(records: Records) -> dict[str, int]:
    return {table.value: records.count(table) for table in Table}
