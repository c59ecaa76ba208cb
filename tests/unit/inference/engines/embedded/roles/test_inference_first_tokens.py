"""What the first token of an answer does not wait for."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import masking_utils

from services.inference.engines.embedded.messages import HeldPrompt, Read
from tests.contract.engines import BLOCK_TOKENS, GREEDY, make_prompt, prompt_ids
from tests.support.inference.embedded_actors import BothByHand


def test_first_token_does_not_wait_for_the_cache(tmp_path: Path) -> None:
    """A prompt is cached after the delivery of its first token, and before the next message."""
    both = BothByHand(tmp_path)
    prompt = make_prompt(prompt_ids(3 * BLOCK_TOKENS), GREEDY)
    cached: list[int] = []

    def deliver(outcome: object) -> None:
        assert isinstance(outcome, HeldPrompt)
        cached.append(both.reserve(prompt))

    both.actor.receive_batch([Read(prompt=prompt, asked_s=0.0, deliver=deliver)])
    both.work()
    assert [*cached, both.reserve(prompt)] == [0, 3 * BLOCK_TOKENS]


def test_pass_prepares_no_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys and values of the engine have their own; transformers need not look for packed
    sequences, which on a GPU waits for the device."""
    both = BothByHand(tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("a mask was prepared")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", refuse)
    both.read(prompt_ids(BLOCK_TOKENS))
    both.work()
    assert len(both.held) == 1
