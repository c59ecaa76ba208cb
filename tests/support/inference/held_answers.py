"""Answers that stop in the middle until a test lets them end.

What a test does in mid-answer, such as a swap of weights or a kill, is done before the answer ends,
however slow it is. In engines of this process, and in workers that a test starts
(`InferenceCluster`, by `held_worker`). Not here: passes of prefill (`hand_off`), and vLLM, whose
steps are in another process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from services.inference.engines.embedded.decode import DecodeActor
from services.inference.engines.embedded.messages import Join
from services.inference.engines.embedded.sequences import DecodeSequence
from tests.support.inference.tensorrt_llm_fake.core import Core, Request
from tests.support.runtime.waiting import until

_PAUSE_S = 0.001


class HeldAnswers:
    """Whether the engines of this process stop at a number of tokens; others can be aborted, or get
    other weights, meanwhile."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._free = threading.Event()
        self.joined = 0
        """Requests that have come to an embedded engine to sample, also those that it refused."""

    def free(self) -> None:
        """Lets all answers end."""
        self._free.set()

    async def has(self, requests: int) -> None:
        """Returns once so many have come."""
        await until(lambda: self.joined >= requests)

    def holds(self, tokens: int) -> bool:
        """Whether an answer of so many tokens gets no further one."""
        return tokens >= self._tokens and not self._free.is_set()


@contextmanager
def held_answers(tokens: int) -> Iterator[HeldAnswers]:
    """Around requests: their answers stop at `tokens` tokens. All before are sent."""
    held = HeldAnswers(tokens)
    advance, join = Core._advance, DecodeActor._join

    def counted_join(actor: DecodeActor, message: Join) -> None:
        try:
            join(actor, message)
        finally:
            held.joined += 1

    def advance_request(core: Core, request: Request) -> bool:
        if not request.aborted and held.holds(len(request.output.token_ids)):
            time.sleep(_PAUSE_S)
            return False
        return advance(core, request)

    with (
        stopping(held.holds),
        mock.patch.object(DecodeActor, "_join", counted_join),
        mock.patch.object(Core, "_advance", advance_request),
    ):
        try:
            yield held
        finally:
            held.free()


@contextmanager
def stopping(holds: Callable[[int], bool]) -> Iterator[None]:
    """The embedded engines of this process take no step while `holds` is true for the tokens of one
    of their answers."""
    run_step, is_due = DecodeActor._run_step, DecodeSequence.is_due

    def step(actor: DecodeActor) -> None:
        if any(holds(len(one.sampled)) for one in actor._running):
            time.sleep(_PAUSE_S)
        else:
            run_step(actor)

    def due(sequence: DecodeSequence, now_s: float) -> bool:
        return holds(len(sequence.sampled)) or is_due(sequence, now_s)

    with (
        mock.patch.object(DecodeActor, "_run_step", step),
        mock.patch.object(DecodeSequence, "is_due", due),
    ):
        yield


class HoldFile:
    """The number of tokens at which answers of other processes stop; without the file at none."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def hold(self, tokens: int) -> None:
        """Answers stop at so many tokens."""
        written = self._path.with_suffix(".new")
        written.write_text(str(tokens))
        written.replace(self._path)

    def free(self) -> None:
        """Lets all answers end."""
        self._path.unlink(missing_ok=True)

    def holds(self, tokens: int) -> bool:
        """As `HeldAnswers.holds`."""
        try:
            return tokens >= int(self._path.read_text())
        except FileNotFoundError:
            return False
