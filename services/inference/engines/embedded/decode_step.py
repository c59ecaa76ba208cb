"""One decode step over all running sequences: drafts, one forward pass, draws, accepted tokens.

The pass computes the last sampled token of each sequence and its drafts. Row s of a sequence draws
the token behind s drafts, so rows count as long as each draft before them was drawn, too. Keys and
values of rejected drafts stay behind the end of their row, where the next step overwrites them.

Shape suffixes: N rows, C hidden channels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from forge.core.errors import ForgeError
from services.inference.engines.embedded.decode_pass import DecodePass, SlabPass
from services.inference.engines.embedded.kv.extents import Extents
from services.inference.engines.embedded.kv.shared_prefixes import SharedPrefixes
from services.inference.engines.embedded.kv.slabs import Slabs
from services.inference.engines.embedded.kv.state_rows import StateRows
from services.inference.engines.embedded.metrics import (
    ACCEPTED,
    DRAFT_DEPTH,
    DRAFT_GAIN,
    DRAFTED,
)
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.model.sampler import Drawn, DrawnToken
from services.inference.engines.embedded.sequences import DecodeSequence
from services.inference.engines.embedded.speculation.depth import DepthChooser
from services.inference.engines.embedded.speculation.drafter import Draft, Drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a step for one sequence."""

    tokens: list[DrawnToken]
    """In order; after one that ends the answer, or whose log-prob is not finite, none follows."""
    routes: torch.Tensor | None = None
    """Experts of the tokens before these, a row each; None if they are not recorded."""
    failure: ForgeError | None = None
    """Reason why no token can follow these."""


@dataclass(slots=True, kw_only=True)
class _Acceptance:
    """Counts by head."""

    offered: list[int] = field(default_factory=list)
    """Drafts whose earlier drafts were all accepted."""
    accepted: list[int] = field(default_factory=list)

    def count(self, head: int, *, accepted: bool) -> None:
        while len(self.offered) <= head:
            self.offered.append(0)
            self.accepted.append(0)
        self.offered[head] += 1
        self.accepted[head] += accepted


class DecodeStep:
    """Runs steps; owns the choice of the number of drafts."""

    def __init__(
        self,
        policy: Policy,
        running: Slabs[DecodeSequence] | Extents[DecodeSequence],
        prefixes: SharedPrefixes | None,
        drafter: Drafter,
        depth: DepthChooser,
        *,
        states: StateRows | None = None,
        device_pass: DecodePass | None = None,
    ) -> None:
        """`states`: of the running sequences' recurrent layers; then there are no drafts.
        `device_pass`: the pass over extents, which have no shared prefixes."""
        self.policy = policy
        self.running = running
        self.prefixes = prefixes
        self.states = states
        if device_pass is None:
            assert isinstance(running, Slabs)
            device_pass = SlabPass(policy, running, prefixes, states)
        self._pass = device_pass
        self._drafter = drafter
        self._depth = depth

    def after_swap(self) -> None:
        """Take note of other weights."""
        self._pass.after_swap()

    def plan(self) -> None:
        """Set `step_tokens` of all running sequences for the next step."""
        depth = self._depth.choose(len(self.running), most=self._drafter.most)
        for sequence in self.running:
            drafts = depth if self._drafter.is_ready(sequence) else 0
            sequence.step_tokens = 1 + max(0, min(drafts, sequence.left - 1))

    def run(self, sequences: Sequence[DecodeSequence]) -> list[tuple[DecodeSequence, Outcome]]:
        """Run a step over all running sequences, or over consecutive ones of them; they have room
        for their `step_tokens`. After an error their tokens are as before the step; if all ran,
        the states of recurrent layers are lost."""
        began_s = time.perf_counter()
        depth = max(sequence.step_tokens for sequence in sequences) - 1
        drafts = self._drafter.draft(sequences)
        for sequence, draft in zip(sequences, drafts, strict=True):
            sequence.step_tokens = 1 + len(draft.ids)
        drawn = self._pass.run(sequences, drafts)
        states_NC, routes_NX = self.policy.head.states, self.policy.routes_NX
        if routes_NX is not None:
            routes_NX = routes_NX.cpu()
        counts = _Acceptance()
        outcomes = []
        states: list[torch.Tensor | None] = []
        row = 0
        for sequence, draft in zip(sequences, drafts, strict=True):
            outcome = _outcome(sequence, draft, drawn, row, counts)
            if routes_NX is not None:
                outcome = replace(outcome, routes=routes_NX[row : row + len(outcome.tokens)])
            state = sequence.state
            if self._drafter.most and outcome.tokens:
                # A copy: a view would keep the states of the whole step.
                last_C = states_NC[row + len(outcome.tokens) - 1]
                state = last_C.to(self.policy.dtype, copy=True)
            row += sequence.step_tokens
            states.append(state)
            outcomes.append((sequence, outcome))
        if self._drafter.most:
            self._drafter.observe([one.token for _, done in outcomes for one in done.tokens])
        # From here on nothing takes memory: a step that fails is repeated.
        for (sequence, outcome), state in zip(outcomes, states, strict=True):
            # The failed row has computed its token, too.
            sequence.tokens += len(outcome.tokens) + (outcome.failure is not None)
            sequence.state = state
        if self.states is not None:
            self.states.advance()
        self._observe(drafts, counts, depth=depth, seconds=time.perf_counter() - began_s)
        return outcomes

    def _observe(
        self, drafts: Sequence[Draft], counts: _Acceptance, *, depth: int, seconds: float
    ) -> None:
        most = self._drafter.most
        if not most:
            return
        self._depth.observe(
            sequences=len(drafts),
            depth=depth,
            seconds=seconds,
            offered=counts.offered,
            accepted=counts.accepted,
        )
        for head in range(depth):
            DRAFTED.labels(str(head + 1)).inc(sum(len(draft.ids) > head for draft in drafts))
        for head, accepted in enumerate(counts.accepted):
            ACCEPTED.labels(str(head + 1)).inc(accepted)
        best = self._depth.best(len(drafts), most=most)
        DRAFT_DEPTH.set(best)
        DRAFT_GAIN.set(self._depth.gain(len(drafts), best))


def _outcome(
    sequence: DecodeSequence, draft: Draft, drawn: Drawn, first_row: int, counts: _Acceptance
) -> Outcome:
    """The tokens of one sequence, whose rows begin at `first_row`."""
    tokens: list[DrawnToken] = []
    for index in range(1 + len(draft.ids)):
        row = first_row + index
        if row in drawn.failed:
            return Outcome(tokens=tokens, failure=drawn.failed[row])
        token = drawn.row(row)
        tokens.append(token)
        sampled = len(sequence.sampled) + len(tokens)
        accepted = index < len(draft.ids) and token.token == draft.ids[index]
        if index < len(draft.ids):
            counts.count(index, accepted=accepted)
        ended = sequence.finish_with(token.token, sampled=sampled) is not None
        if not accepted or ended or not math.isfinite(token.logprob):
            break
    return Outcome(tokens=tokens)
