"""The prompts of a prefill instance, during the read and until a decode instance fetches them.

Owns the limit on their memory: a prompt that does not fit waits, in the order of arrival, until
others are fetched, released or expired. Equal prompts are read once and counted once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from forge.core.errors import ResourceExhausted
from forge.core.token_columns import TOKEN_BYTES
from services.inference.engines.base import Prompt
from services.inference.engines.embedded.messages import HeldPrompt


@dataclass(frozen=True, slots=True)
class _Held:
    prompt: HeldPrompt
    expiry: asyncio.TimerHandle


class HeldPrompts:
    """At most `capacity_bytes` of keys and values, held or during the read."""

    def __init__(
        self,
        *,
        capacity_bytes: int,
        token_bytes: int,
        on_release: Callable[[], None],
        prompt_bytes: int,
    ) -> None:
        """`prompt_bytes`: of a prompt of any length, during its read."""
        self._capacity_bytes = capacity_bytes
        self._token_bytes = token_bytes
        self._prompt_bytes = prompt_bytes
        self._on_release = on_release
        self._held: dict[str, _Held] = {}
        self._reading: Counter[bytes] = Counter()
        """Number of requests for the same read, by ids."""
        self._line: deque[tuple[Prompt, asyncio.Future[None]]] = deque()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held

    @asynccontextmanager
    async def reading(self, prompt: Prompt) -> AsyncIterator[None]:
        """Wait for memory; around the read of a prompt.

        Raises ResourceExhausted for a prompt above the whole capacity.
        """
        needed = self._needed_bytes(prompt.ids)
        if needed > self._capacity_bytes:
            raise ResourceExhausted(
                f"a prompt of {prompt.tokens} tokens takes {needed} bytes of keys and values, more "
                f"than all of {self._capacity_bytes} (kv.mib)",
                retry_after_s=0.5,
            )
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((prompt, granted))
        self._advance()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._reading -= Counter([prompt.ids])
            self._advance()

    def hold(self, prompt: Prompt, read: HeldPrompt, *, hold_s: float) -> None:
        """Hold a prompt for `hold_s`. Call it inside `reading`."""
        expiry = asyncio.get_running_loop().call_later(hold_s, self.release, prompt.request_id)
        self._held[prompt.request_id] = _Held(read, expiry)

    def get(self, request_id: str) -> HeldPrompt | None:
        """Return a held prompt, None if unknown."""
        held = self._held.get(request_id)
        return None if held is None else held.prompt

    def release(self, request_id: str) -> None:
        """Drop a held prompt; an unknown id changes nothing."""
        held = self._held.pop(request_id, None)
        if held is not None:
            held.expiry.cancel()
            self._on_release()
            self._advance()

    def clear(self) -> None:
        """Drop all held prompts."""
        for request_id in list(self._held):
            self.release(request_id)

    def _advance(self) -> None:
        while self._line:
            prompt, granted = self._line[0]
            # Done: its caller has left.
            if not granted.done():
                own = 0 if prompt.ids in self._reading else self._needed_bytes(prompt.ids)
                if self._bytes() + own > self._capacity_bytes:
                    return
                self._reading[prompt.ids] += 1
                granted.set_result(None)
            self._line.popleft()

    def _bytes(self) -> int:
        read = {id(held.prompt.kv): held.prompt.nbytes for held in self._held.values()}
        return sum(read.values()) + sum(self._needed_bytes(ids) for ids in self._reading)

    def _needed_bytes(self, ids: bytes) -> int:
        return len(ids) // TOKEN_BYTES * self._token_bytes + self._prompt_bytes
