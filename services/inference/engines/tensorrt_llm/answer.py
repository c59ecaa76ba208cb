"""One answer: its tokens so far, over as many legs as it takes.

A leg ends early when the weights change or its hand-off is lost; then the next one reads the prompt
and the tokens so far. Its task runs whether or not the caller waits.
"""

from __future__ import annotations

import asyncio
from typing import Any

from forge.core.errors import ForgeError, Unavailable
from forge.core.token_columns import int32_array
from forge.runtime.telemetry import log
from services.inference.engines.base import Finish, Prompt, Tokens
from services.inference.engines.tensorrt_llm.hand_off import HandOff, generation_params
from services.inference.engines.tensorrt_llm.llm import Leg, Llm
from services.inference.engines.tensorrt_llm.metrics import CONTINUED
from services.inference.engines.tensorrt_llm.requests import (
    Sampled,
    WrongAnswer,
    is_cancelled,
    read_finish,
    read_tokens,
    sampling_params,
)

_MOST_EMPTY_LEGS = 3
"""Legs in a row that the library ends without a token and without cause."""


class LlmAnswer:
    """Tokens of one request, until a finish or an error."""

    def __init__(
        self, llm: Llm, prompt: Prompt, *, first: Tokens | None, hand_off: HandOff | None
    ) -> None:
        """`first`: what prefill sampled; its keys and values arrive by `hand_off`, or are computed
        again."""
        self.finish: Finish | None = None
        self._llm = llm
        self._sampling = prompt.sampling
        self._prompt_ids = list(int32_array(prompt.ids))
        self._hand_off = hand_off
        self._tokens = Sampled()
        if first is not None:
            self._tokens.extend(first)
        self._error: ForgeError | None = None
        self._news = asyncio.Event()
        self._stopping = False
        self._leg: Leg | None = None
        self._legs = 0
        self._empty_legs = 0
        self._task = asyncio.create_task(self._run())

    @property
    def is_done(self) -> bool:
        """Whether nothing of it runs any more."""
        return self._task.done()

    async def ended(self) -> None:
        """Wait until nothing of it runs any more."""
        await asyncio.wait({self._task})

    async def after(self, count: int, *, whole: bool = False) -> Tokens:
        """Return the tokens from number `count` on, once there are any, or with `whole` once the
        answer has ended. Raises its error."""
        while True:
            self._news.clear()
            ready = self.finish is not None or (not whole and len(self._tokens.ids) > count)
            if ready:
                return self._tokens.tokens(count)
            if self._error is not None:
                raise self._error
            await self._news.wait()

    def stop(self) -> None:
        """Stop sampling, and free the engine's memory of it."""
        self._stopping = True
        if self._leg is not None:
            self._leg.abort()

    async def _run(self) -> None:
        try:
            self._finish_early()
            while self.finish is None and not self._stopping:
                await self._llm.gate.passed()
                await self._one_leg()
        except ForgeError as error:
            self._error = error
        except Exception as error:  # Raised to the caller; the engine keeps running.
            log.error("tensorrt_llm_answer_failed", error=f"{type(error).__name__}: {error}")
            self._error = WrongAnswer(f"engine 'tensorrt_llm': {type(error).__name__}: {error}")
        finally:
            if self.finish is None and self._error is None:
                self._error = Unavailable("the request was aborted")
            self._news.set()

    def _finish_early(self) -> None:
        """The first token may be the last."""
        if self._tokens.ids and self._tokens.ids[-1] in self._sampling.stop_ids:
            self.finish = Finish.STOP
        elif len(self._tokens.ids) >= self._sampling.max_tokens:
            self.finish = Finish.LENGTH

    async def _one_leg(self) -> None:
        if not self._llm.version:
            raise Unavailable("engine 'tensorrt_llm' has no weights yet")
        hand_off = self._fresh_hand_off()
        known = len(self._tokens.ids)
        ids = self._prompt_ids if hand_off else [*self._prompt_ids, *self._tokens.ids]
        params = sampling_params(
            self._llm.library,
            self._sampling,
            max_tokens=self._sampling.max_tokens - (0 if hand_off else known),
            leg=self._legs,
        )
        self._legs += 1
        received = generation_params(self._llm.library, hand_off) if hand_off else None
        try:
            async with self._llm.leg(ids, params, hand_off=received) as leg:
                self._leg = leg
                await self._follow(leg, start=known if hand_off else 0)
        except Unavailable:
            arrived = self._leg is not None and not self._leg.transferring
            if hand_off is None or arrived:
                raise
            CONTINUED.labels("lost").inc()
        finally:
            self._leg = None

    def _fresh_hand_off(self) -> HandOff | None:
        """Return the hand-off at its first use, if it is of the weights in service."""
        hand_off, self._hand_off = self._hand_off, None
        if hand_off is not None and hand_off.weight_version != self._llm.version:
            CONTINUED.labels("version").inc()
            return None
        return hand_off

    async def _follow(self, leg: Leg, *, start: int) -> None:
        """Take the tokens of a leg until it ends. `start`: those that it repeats."""
        if self._stopping:
            leg.abort()
        seen = start
        async for result in leg.result:
            output = result.outputs[0]
            if len(output.token_ids) > start:
                leg.note_token()
            if start and list(output.token_ids[:start]) != self._tokens.ids[:start]:
                raise WrongAnswer("tensorrt_llm's decode does not begin with prefill's token")
            seen += self._take(output, leg, seen)
            if is_cancelled(output):
                break
            self.finish = read_finish(output)
            self._news.set()
        if self.finish is None:
            self._note_end(empty=seen == start)

    def _take(self, output: Any, leg: Leg, seen: int) -> int:
        found = read_tokens(output, start=seen, sampling=self._sampling, version=leg.version)
        self._tokens.extend(found)
        return len(found.ids)

    def _note_end(self, *, empty: bool) -> None:
        """A leg was ended by an update, by the caller, or by the library."""
        self._empty_legs = self._empty_legs + 1 if empty else 0
        if self._empty_legs > _MOST_EMPTY_LEGS:
            raise Unavailable(
                f"tensorrt_llm ended a request {self._empty_legs} times without a reason"
            )
        if not self._stopping:
            CONTINUED.labels("update").inc()
