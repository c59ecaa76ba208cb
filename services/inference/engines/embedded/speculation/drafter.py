"""Makes the drafts of a step.

Shape suffixes: R sequences that draft, C hidden channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.model.sampler import draw
from services.inference.engines.embedded.sequences import DecodeSequence
from services.inference.engines.embedded.speculation.draft_vocabulary import (
    LEAST_VOCABULARY,
    DraftVocabulary,
)
from services.inference.engines.embedded.speculation.mask_tape import MaskTape
from services.inference.engines.grammar_masks import Matcher


@dataclass(slots=True, kw_only=True)
class Draft:
    """Drafts of one sequence's next tokens."""

    ids: list[int] = field(default_factory=list)
    tape: MaskTape | None = None
    """With a grammar and a draft."""

    def matcher_after(self, drafts: int, sequence: DecodeSequence) -> Matcher | None:
        """Fills the mask of the token after so many drafts."""
        return sequence.matcher if self.tape is None else self.tape.after(drafts)


class Drafter(Protocol):
    """Drafts tokens for sequences."""

    @property
    def most(self) -> int:
        """Most drafts of a sequence with the present weights."""

    def is_ready(self, sequence: DecodeSequence) -> bool:
        """Whether it can draft for this sequence now."""

    def draft(self, sequences: Sequence[DecodeSequence]) -> list[Draft]:
        """For each sequence at most `step_tokens` - 1 drafts, none of them a stop token: the step
        samples the token of that place in any case."""

    def observe(self, tokens: Sequence[int]) -> None:
        """Take note of sampled tokens."""


class HeadDrafter:
    """Drafts with the draft heads of the policy's weights."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._vocabulary: DraftVocabulary | None = None
        """On a CPU, with a large vocabulary."""
        vocabulary = policy.limits.vocabulary
        if policy.device.type == "cpu" and vocabulary >= LEAST_VOCABULARY:
            self._vocabulary = DraftVocabulary(vocabulary)

    @property
    def most(self) -> int:
        """The number of heads."""
        return 0 if self._policy.drafts is None else len(self._policy.drafts)

    def is_ready(self, sequence: DecodeSequence) -> bool:
        """Only behind a known hidden state."""
        return sequence.state is not None

    def observe(self, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        if self._vocabulary is not None:
            self._vocabulary.observe(tokens)

    def draft(self, sequences: Sequence[DecodeSequence]) -> list[Draft]:
        """See `Drafter`."""
        drafts = [Draft() for _ in sequences]
        rows = []
        states = []
        for row, sequence in enumerate(sequences):
            if sequence.step_tokens > 1 and sequence.state is not None:
                rows.append(row)
                states.append(sequence.state)
                if sequence.matcher is not None:
                    drafts[row].tape = MaskTape(sequence.matcher)
        if rows:
            self._chain(sequences, drafts, rows, torch.stack(states))
        return drafts

    def _chain(
        self,
        sequences: Sequence[DecodeSequence],
        drafts: Sequence[Draft],
        rows: list[int],
        states_RC: torch.Tensor,
    ) -> None:
        """Draft head after head for the sequences `rows`, each up to its limit."""
        heads = self._policy.drafts
        assert heads is not None
        among = self._vocabulary.tokens if self._vocabulary is not None else None
        last = [sequences[row].sampled[-1] for row in rows]
        for number in range(len(heads)):
            ids_R = torch.tensor(last, device=states_RC.device)
            states_RC, logits_RV = heads.draft(number, states_RC, ids_R, among)
            drawn = draw(
                logits_RV,
                [sequences[row].prompt for row in rows],
                positions=[sequences[row].position + number for row in rows],
                matchers=[drafts[row].tape for row in rows],
                answers=[sequences[row].answer_with(drafts[row].ids) for row in rows],
                among=among,
            )
            kept = []
            for place, row in enumerate(rows):
                sequence, draft, token = sequences[row], drafts[row], drawn.ids[place]
                stops = token in sequence.prompt.sampling.stop_ids
                # Without a finite log-prob the grammar allows none of the tokens that are drafted.
                if stops or place in drawn.failed or not math.isfinite(drawn.logprobs[place]):
                    continue
                draft.ids.append(token)
                if draft.tape is not None:
                    draft.tape.advance(token)
                if len(draft.ids) < sequence.step_tokens - 1:
                    kept.append(place)
            if not kept:
                return
            if len(kept) < len(rows):
                states_RC = states_RC[kept]
            last = [drawn.ids[place] for place in kept]
            rows = [rows[place] for place in kept]
