"""Weights that come back under their version while requests hold prefixes of their first time."""

from __future__ import annotations

from pathlib import Path

from tests.contract.engines import prompt_ids, reference
from tests.support.inference.embedded_actors import BothByHand
from tests.support.inference.transformers_answers import greedy_of


def finish(both: BothByHand) -> None:
    while both.work():
        pass


def test_group_that_waits_through_a_rollback_is_answered(tmp_path: Path) -> None:
    """It shares a prefix that the swaps have taken out of the cache, and its answers are those of
    the version, as is that of the next request."""
    both = BothByHand(tmp_path, max_running=1)
    (busy,) = both.read(prompt_ids(8), most=6)
    finish(both)
    running = both.sample(busy)
    both.work()
    common = prompt_ids(120, seed=1)
    group = [common + prompt_ids(3, seed=10 + number) for number in range(3)]
    prompts = both.read(*group)
    both.work()
    assert all(one.request_id in both.held for one in prompts)
    answers = [both.sample(prompt) for prompt in prompts]
    assert not any(answer.finish for answer in [running, *answers])
    both.swap(2, seed=1)
    both.work()
    both.swap(1)
    finish(both)
    model = reference("qwen3")
    for ids, answer in zip(group, answers, strict=True):
        assert answer.ids == greedy_of(model, ids, 16)
    (prompt,) = both.read(group[0])
    finish(both)
    again = both.sample(prompt)
    finish(both)
    assert again.ids == answers[0].ids


def test_prefix_reserved_before_a_rollback_is_not_extended(tmp_path: Path) -> None:
    """A request fetches the rest of its prompt while the weights change and come back: its answer
    is right, and what it caches is whole."""
    both = BothByHand(tmp_path)
    known = prompt_ids(64, seed=1)
    both.read(known)
    finish(both)
    ids = known + prompt_ids(20, seed=2)
    (prompt,) = both.read(ids)
    finish(both)
    cached = both.reserve(prompt)
    assert cached >= 64
    both.swap(2, seed=1)
    both.swap(1)
    answer = both.sample(prompt, cached=cached)
    finish(both)
    assert answer.ids == greedy_of(reference("qwen3"), ids, 16)
    follow = ids + answer.ids + prompt_ids(5, seed=3)
    (turn,) = both.read(follow)
    finish(both)
    last = both.sample(turn)
    finish(both)
    assert last.ids == greedy_of(reference("qwen3"), follow, 16)
