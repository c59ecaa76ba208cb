"""Signs of life between ranks of several hosts, through the store of their group.

Owns the threads that send and observe them. A host that vanishes closes no connection, so an
exchange with its ranks would wait without end, and a trainer that waits for a batch has no exchange
at all. Ranks above 0 send heartbeats; rank 0 observes them, and ends its process when one is
missing. It ends abruptly: its thread may be in an exchange, which nothing interrupts.
"""

from __future__ import annotations

import os
import sys
import threading
import time

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
        self._others = range(1, ranks)
        self._stopped = threading.Event()
        work = self._send if rank else self._observe
        threading.Thread(target=work, name="heartbeats", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _send(self) -> None:
        number = 0
        while not self._stopped.wait(BEAT_S):
            number += 1
            try:
                self._store.set(_key(self._rank), str(number))
            except RuntimeError as error:
                # At the end of a run rank 0's host ends its store before this rank has ended.
                if not self._stopped.wait(_END_S):
                    _end(f"the store of the ranks is gone: {error}", rank=self._rank)

    def _observe(self) -> None:
        silence = Silence(len(self._others), now_s=time.monotonic())
        while not self._stopped.wait(BEAT_S):
            keys = [_key(one) for one in self._others]
            try:
                # A single get of a missing key would wait for it.
                beats = [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
            except RuntimeError:
                return  # torchrun has ended, and this rank with it
            missing = silence.lost(beats, now_s=time.monotonic())
            if missing is not None and not self._stopped.is_set():
                rank = self._others[missing]
                _end(f"rank {rank} sent no heartbeat for {LOST_S:.0f} s", rank=self._rank)


class Silence:
    """Which of several senders is silent for `LOST_S`."""

    def __init__(self, senders: int, *, now_s: float) -> None:
        self._newest: list[bytes] = [b""] * senders
        self._heard_s = [now_s] * senders

    def lost(self, beats: list[bytes], *, now_s: float) -> int | None:
        """The first silent sender, if there is one; `beats` are the newest of each."""
        for sender, beat in enumerate(beats):
            if beat != self._newest[sender]:
                self._newest[sender], self._heard_s[sender] = beat, now_s
            elif now_s - self._heard_s[sender] > LOST_S:
                return sender
        return None


def _end(reason: str, *, rank: int) -> None:
    log.error("rank_ended", rank=rank, because=reason)
    report_failure(reason)
    sys.stderr.flush()
    os._exit(1)


def _key(rank: int) -> str:
    return f"beat/{rank}"
