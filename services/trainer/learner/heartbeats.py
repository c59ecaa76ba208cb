"""Signs of life between ranks: through the store of their group under torchrun, else by files.

Owns the threads that send and observe them. A frozen process and a host that vanishes close no
connection, so an exchange with their ranks would wait without end, and a trainer that waits for a
batch has no exchange at all. Under torchrun rank 0 observes all ranks, and each other rank observes
rank 0; a rank ends its process when a heartbeat is missing. It ends abruptly: its thread may be in
an exchange, which nothing interrupts. Without torchrun rank 0 is the parent of the others: it kills
the silent one, and learns of that as of any death.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from forge.runtime.telemetry import log
from services.trainer.torchrun_rank import report_failure

BEAT_S = 2.0
LOST_S = 60.0
"""A rank that sends nothing for so long is lost."""
_END_S = 10.0
"""Time in which a rank ends by itself once the store is gone."""


class Heartbeats:
    """The heartbeats of one rank; `stop` ends them."""

    def __init__(self, store: Store, *, rank: int, ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._others = [0] if rank else [*range(1, ranks)]
        self._silence = Silence(len(self._others), now_s=time.monotonic())
        self._stopped = threading.Event()
        # Two threads: a store on a host that has vanished answers no call, and ends none.
        for work in (self._exchange, self._watch):
            threading.Thread(target=work, name="heartbeats", daemon=True).start()

    def stop(self) -> None:
        """End the threads."""
        self._stopped.set()

    def _exchange(self) -> None:
        """Send heartbeats, and read those of the others."""
        number = 0
        keys = [_key(one) for one in self._others]
        while not self._stopped.wait(BEAT_S):
            number += 1
            try:
                self._store.set(_key(self._rank), str(number))
                # A single get of a missing key would wait for it.
                beats = [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
            except RuntimeError as error:
                # At the end of a run rank 0's host ends its store before this rank has ended.
                if not self._stopped.wait(_END_S):
                    end_rank(f"the store of the ranks is gone: {error}", rank=self._rank)
                return
            self._silence.heard(beats, now_s=time.monotonic())

    def _watch(self) -> None:
        """End the process when another rank is silent."""
        while not self._stopped.wait(BEAT_S):
            missing = self._silence.lost(now_s=time.monotonic())
            if missing is not None and not self._stopped.is_set():
                silent = self._others[missing]
                end_rank(f"rank {silent} sent no heartbeat for {LOST_S:.0f} s", rank=self._rank)


class ChildHeartbeats:
    """Rank 0's watch over its child processes; `stop` ends it."""

    def __init__(
        self,
        files: Sequence[Path],
        *,
        on_lost: Callable[[int], None],
        exchange: Callable[[], int],
        on_stuck: Callable[[int], None],
    ) -> None:
        """`files`: those that ranks 1 and up touch; `on_lost` gets the rank that is silent.

        `exchange` is the number of the exchange that rank 0 is in, 0: none. After the loss,
        `on_stuck` gets the same rank if one exchange lasts `LOST_S`. gloo ends such an exchange,
        NCCL may not.
        """
        self._files = files
        self._on_lost = on_lost
        self._exchange = exchange
        self._on_stuck = on_stuck
        self._silence = Silence(len(files), now_s=time.monotonic())
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="heartbeats", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(BEAT_S):
            now_s = time.monotonic()
            self._silence.heard([_touched(file) for file in self._files], now_s=now_s)
            missing = self._silence.lost(now_s=now_s)
            if missing is not None and not self._stopped.is_set():
                # The others end as a consequence.
                self._on_lost(missing + 1)
                self._watch_exchange(missing + 1)
                return

    def _watch_exchange(self, lost: int) -> None:
        """Returns when `stop` is called, or an exchange does not end."""
        before = 0
        while not self._stopped.wait(LOST_S):
            now = self._exchange()
            if now and now == before:
                self._on_stuck(lost)
                return
            before = now


def keep_touching(file: Path) -> None:
    """Touch a file on a thread of its own, until it is removed: the heartbeat of a child."""

    def work() -> None:
        while file.exists():
            with suppress(FileNotFoundError):
                os.utime(file)
            time.sleep(BEAT_S)

    threading.Thread(target=work, name="heartbeats", daemon=True).start()


def _touched(file: Path) -> bytes:
    try:
        return str(file.stat().st_mtime_ns).encode()
    except FileNotFoundError:
        return b""


class Silence:
    """Finds the sender that was silent for `LOST_S`."""

    def __init__(self, senders: int, *, now_s: float) -> None:
        self._newest: list[bytes] = [b""] * senders
        self._heard_s = [now_s] * senders

    def heard(self, beats: list[bytes], *, now_s: float) -> None:
        """Record the newest heartbeat of each sender."""
        for sender, beat in enumerate(beats):
            if beat != self._newest[sender]:
                self._newest[sender], self._heard_s[sender] = beat, now_s

    def lost(self, *, now_s: float) -> int | None:
        """The first silent sender, if there is one."""
        for sender, heard_s in enumerate(self._heard_s):
            if now_s - heard_s > LOST_S:
                return sender
        return None


def end_rank(reason: str, *, rank: int) -> None:
    """End this process with one line, which torchrun reports."""
    log.error("rank_ended", rank=rank, reason=reason)
    report_failure(reason)
    sys.stderr.flush()
    os._exit(1)


def _key(rank: int) -> str:
    return f"beat/{rank}"
