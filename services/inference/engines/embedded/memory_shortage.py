"""Shortages of memory: a pass is repeated in smaller parts, and caching is skipped.

Owns the size of passes after a shortage. The actors plan the parts, and undo the changes of a
failed pass.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from forge.core.errors import ResourceExhausted
from forge.rl.out_of_memory import memory_shortage
from forge.runtime.telemetry import log
from services.inference.engines.embedded.metrics import MEMORY_SHORTAGES

Result = TypeVar("Result")

_CALM_PASSES = 64
"""Passes without a shortage before the next ones may be twice as large."""
_RETRY_AFTER_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Generic[Result]):
    """Outcome of work that may run out of memory."""

    result: Result | None = None
    """None after a shortage."""
    shortage: str = ""
    """First line of the allocator's message; empty without a shortage."""


def attempt(work: Callable[[], Result], device: torch.device) -> Attempt[Result]:
    """Run `work`; after a shortage free the memory that no tensor uses. Other errors pass."""
    try:
        return Attempt(result=work())
    except (RuntimeError, MemoryError) as error:
        shortage = memory_shortage(error)
        if not shortage:
            raise
    # Outside the handler: the error's traceback holds the tensors of the failed pass.
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return Attempt(shortage=shortage)


def keep_if_room(work: str, keep: Callable[[], None], device: torch.device) -> bool:
    """Run `keep`, which only saves later work. Return False if memory was short: nothing is kept.
    `work`: prefill or decode."""
    shortage = attempt(keep, device).shortage
    if shortage:
        MEMORY_SHORTAGES.labels(work, "uncached").inc()
        log.warning("cache_out_of_memory", work=work, reason=shortage)
    return not shortage


class PassLimit:
    """Most tokens of a pass: halved by a shortage, doubled again after passes without one."""

    def __init__(self, work: str, *, most: int, least: int, setting: str) -> None:
        """`work`: prefill or decode; `most`: tokens of a pass without a shortage; `least`: those of
        the smallest one; `setting`: the one that makes passes smaller."""
        self.tokens = most
        self.least = min(least, most)
        self.is_alone = False
        """Whether the next pass has one request alone, since the smallest had several."""
        self._work = work
        self._most = most
        self._setting = setting
        self._calm = 0
        """Passes since the last shortage."""
        self._before = most
        """The limit before the first of successive shortages."""

    def lower(self, tried: int, shortage: str) -> None:
        """Make passes half as large as one of `tried` tokens."""
        self._calm = 0
        self.tokens = max(self.least, min(self.tokens, tried) // 2)
        self.is_alone = self.tokens == self.least
        MEMORY_SHORTAGES.labels(self._work, "split").inc()
        log.warning(
            "pass_out_of_memory",
            work=self._work,
            tokens=tried,
            next_tokens=self.tokens,
            setting=self._setting,
            reason=shortage,
        )

    def refuse(self, request_id: str, *, size: str, shortage: str) -> ResourceExhausted:
        """Return the error of a request that has no memory for its smallest pass. The passes of the
        others become as large again as before it."""
        self.tokens, self.is_alone, self._calm = self._before, False, 0
        return refusal(self._work, request_id, size=size, shortage=shortage)

    def succeeded(self) -> None:
        """Count a pass without a shortage."""
        if self.tokens == self._most and not self.is_alone:
            return
        self._calm += 1
        if self._calm == _CALM_PASSES:
            self.is_alone, self._calm = False, 0
            self._before = self.tokens = min(self._most, 2 * self.tokens)


def refusal(work: str, request_id: str, *, size: str, shortage: str) -> ResourceExhausted:
    """Return the error of a request for whose data or pass alone there is no memory; count it."""
    MEMORY_SHORTAGES.labels(work, "refused").inc()
    setting = "kv.mib or kv.cache_mib"
    log.error(
        "request_out_of_memory",
        work=work,
        request_id=request_id,
        size=size,
        setting=setting,
        reason=shortage,
    )
    return ResourceExhausted(
        f"request {request_id}, {size}, ran out of memory alone in {work}; lower {setting}, which "
        f"leaves more to passes: {shortage}",
        retry_after_s=_RETRY_AFTER_S,
    )
