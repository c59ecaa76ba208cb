"""The passes of the role both: long only where no request waits for their end."""

from __future__ import annotations

from pathlib import Path

from services.inference.engines.embedded.roles.both import BothActor
from tests.contract.engines import prompt_ids, reference
from tests.support.inference.embedded_actors import BothByHand
from tests.support.inference.transformers_answers import greedy_of


def test_first_pass_of_an_idle_worker_is_long(tmp_path: Path) -> None:
    """Prompts that come together are read in one pass; beside an answer, and after a pass whose
    prompts have not begun to sample, in passes of the usual length."""
    both = BothByHand(tmp_path, pass_tokens=96)
    assert isinstance(both.actor, BothActor)
    both.actor._prefill.beside_tokens = 32
    prompts = [prompt_ids(40, seed=number) for number in range(7)]
    first, _ = both.read(*prompts[:2])
    both.work()
    assert len(both.held) == 2
    answer = both.sample(first)
    both.read(prompts[2])
    both.work()
    assert len(both.held) == 2
    both.work()
    assert len(both.held) == 3
    while both.work():
        pass
    assert answer.ids == greedy_of(reference("qwen3"), prompts[0], 16)
    both.read(*prompts[3:])
    both.work()
    assert len(both.held) == 5
    both.work()
    assert len(both.held) < 7
