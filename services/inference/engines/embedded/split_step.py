"""A decode step in as many passes as memory allows.

Usually one. After a shortage of memory the same sequences run in passes of half as many tokens,
first without drafts, until one sequence is left: its request is refused. Keys and values that a
failed pass has stored lie behind the end of their rows, where the next pass overwrites them. States
of recurrent layers change in place in a pass over all sequences: after a shortage there, the
requests are sent back, to be read again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from services.inference.engines.embedded.decode_step import DecodeStep, Outcome
from services.inference.engines.embedded.memory_shortage import PassLimit, attempt
from services.inference.engines.embedded.metrics import MEMORY_SHORTAGES
from services.inference.engines.embedded.outbox import sent_back
from services.inference.engines.embedded.sequences import DecodeSequence


class SplitStep:
    """Runs decode steps."""

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        self._limit = PassLimit(
            "decode", most=sys.maxsize, least=1, setting="max_running or speculation.most_drafts"
        )

    def run(self) -> list[tuple[DecodeSequence, Outcome]]:
        """Run a step over all running sequences, which have room for their `step_tokens`."""
        left = list(self._step.running)
        outcomes: list[tuple[DecodeSequence, Outcome]] = []
        while left:
            part = self._next_part(left)
            tokens = sum(one.step_tokens for one in part)
            tried = attempt(partial(self._step.run, part), self._step.policy.device)
            if tried.result is not None:
                self._limit.succeeded()
                outcomes += tried.result
            elif tokens == 1:
                outcomes.append((part[0], self._refused(part[0], tried.shortage)))
            else:
                self._limit.lower(tokens, tried.shortage)
                if self._step.states is None or len(part) < len(self._step.running):
                    continue
                MEMORY_SHORTAGES.labels("decode", "reread").inc()
                outcomes += [(one, _reread(one)) for one in part]
            left = left[len(part) :]
        return outcomes

    def _next_part(self, left: Sequence[DecodeSequence]) -> list[DecodeSequence]:
        """Return the next sequences that one pass may have, at least one; none drafts if they are
        not all."""
        room = self._limit.tokens
        if sum(one.step_tokens for one in left) <= room:
            return list(left)
        for one in left:
            one.step_tokens = 1
        return list(left[:room])

    def _refused(self, sequence: DecodeSequence, shortage: str) -> Outcome:
        request = sequence.prompt.request_id
        size = f"{sequence.base + sequence.tokens} tokens of prompt and answer"
        error = self._limit.refuse(request, size=size, shortage=shortage)
        return Outcome(tokens=[], failure=error)


def _reread(sequence: DecodeSequence) -> Outcome:
    reason = "since a decode pass ran out of memory, which has changed its states"
    return Outcome(tokens=[], failure=sent_back(sequence.prompt, reason))
