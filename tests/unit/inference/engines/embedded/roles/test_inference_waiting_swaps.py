"""A swap in the role both while prompts wait: which weights read them, and what does not wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.core.errors import ForgeError, ResourceExhausted
from tests.contract.engines import prompt_ids, reference
from tests.support.inference.embedded_actors import BothByHand
from tests.support.inference.transformers_answers import greedy_of

LONG = [prompt_ids(400, seed=20 + number) for number in range(4)]


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BothByHand:
    """Passes of 32 tokens; streamed answers are delivered token by token."""
    monkeypatch.setattr("services.inference.engines.embedded.sequences.STREAM_INTERVAL_S", 0.0)
    return BothByHand(tmp_path, pass_tokens=32)


def test_running_answer_gets_a_token_after_each_pass_before_a_swap(both: BothByHand) -> None:
    """With four long prompts waiting and weights on their way; the tokens until the swap are those
    of the weights before."""
    ids = prompt_ids(20)
    (prompt,) = both.read(ids, most=400)
    both.work()
    answer = both.sample(prompt)
    prompts = both.read(*LONG)
    both.work()
    before = len(answer.ids)
    both.swap(2, seed=1)
    steps = 0
    while len(both.outcomes) == 1:
        assert both.policy.version == 1
        assert len(answer.ids) == before + steps
        both.work()
        steps += 1
    assert steps > len(LONG[0]) // 32
    # The last step came after the swap.
    assert answer.versions == [1] * (len(answer.ids) - 1) + [2]
    assert answer.ids[:-1] == greedy_of(reference("qwen3"), ids, len(answer.ids) - 1)
    while any(prompt.request_id not in both.held for prompt in prompts):
        before = len(answer.ids)
        both.work()
        assert len(answer.ids) == before + 1


def test_swap_waits_only_for_prompts_that_have_begun(both: BothByHand) -> None:
    """The others, and one that comes while it waits, are read by the new weights alone."""
    prompts = both.read(*LONG)
    both.work()
    both.swap(2, seed=1)
    late = prompt_ids(40, seed=9)
    prompts += both.read(late)
    while both.work():
        pass
    assert both.outcomes == [None, None]
    found = [both.held[prompt.request_id] for prompt in prompts]
    # A pass has room for the oldest and the one with the fewest tokens left.
    assert sorted(held.version for held in found) == [1, 1, 2, 2, 2]
    assert found[0].version == 1 and found[-1].version == 2
    for ids, held in zip([*LONG, late], found, strict=True):
        model = reference("qwen3", seed=held.version - 1)
        assert list(held.prefilled.first.ids) == greedy_of(model, ids, 1)
        assert set(held.prefilled.first.versions) == {held.version}
        assert not held.prefilled.cached_tokens


def test_sharer_of_a_prompt_that_has_not_begun_waits_with_it(both: BothByHand) -> None:
    """Two later prompts begin alike, one like the first: each is computed by one version alone."""
    common = prompt_ids(64, seed=5)
    alike = [common + prompt_ids(60, seed=30 + number) for number in range(2)]
    begun = [*LONG[0][:200], *prompt_ids(9, seed=7)]
    prompts = both.read(LONG[0], begun, *alike)
    both.work()
    both.swap(2, seed=1)
    while both.work():
        pass
    for ids, prompt in zip([LONG[0], begun, *alike], prompts, strict=True):
        held = both.held[prompt.request_id]
        model = reference("qwen3", seed=held.version - 1)
        assert list(held.prefilled.first.ids) == greedy_of(model, ids, 1)


def test_two_swaps_wait_in_order_and_an_aborted_prompt_delays_none(both: BothByHand) -> None:
    """The second serves what comes after it; a prompt that left while it waited is not read."""
    (oldest,) = both.read(LONG[0])
    both.work()
    both.swap(2, seed=1)
    left, between = both.read(prompt_ids(30, seed=1), prompt_ids(31, seed=2))
    both.swap(3, seed=2)
    (last,) = both.read(prompt_ids(32, seed=3))
    both.abort(left)
    assert len(both.outcomes) == 1
    both.abort(oldest)
    # No prompt that had begun is left: the swaps take place at once.
    assert both.outcomes == [None, None, None]
    while both.work():
        pass
    assert set(both.held) == {between.request_id, last.request_id}
    assert both.held[last.request_id].version == 3


def test_refused_weights_leave_the_waiting_prompts_to_those_served(both: BothByHand) -> None:
    """A refusal arrives when the swap would have; the prompts behind it are read all the same."""
    prompts = both.read(*LONG[:2])
    both.work()
    both.swap(2, seed=1, broken=True)
    prompts += both.read(prompt_ids(40, seed=9))
    while both.work():
        pass
    assert isinstance(both.outcomes[1], ForgeError)
    assert {both.held[prompt.request_id].version for prompt in prompts} == {1}


def test_prompt_read_before_a_swap_is_read_again(tmp_path: Path) -> None:
    """With `recompute`, weights that change between the read and the first step leave no answer
    of two versions."""
    both = BothByHand(tmp_path, recompute_on_update=True)
    (prompt,) = both.read(LONG[0])
    while both.work():
        pass
    both.swap(2, seed=1)
    with pytest.raises(ResourceExhausted, match="read again by weights 2"):
        both.sample(prompt)
    both.swap(1)
    answer = both.sample(prompt)
    while both.work():
        pass
    assert answer.ids == greedy_of(reference("qwen3"), LONG[0], 16)


def test_prefix_reserved_before_a_swap_is_read_again(tmp_path: Path) -> None:
    """With `recompute`, also if another worker has computed the rest of the prompt."""
    both = BothByHand(tmp_path, recompute_on_update=True)
    known = prompt_ids(64, seed=1)
    both.read(known)
    while both.work():
        pass
    ids = known + prompt_ids(20, seed=2)
    (prompt,) = both.read(ids)
    while both.work():
        pass
    cached = both.reserve(prompt)
    assert cached >= 64
    both.swap(2, seed=1)
    with pytest.raises(ResourceExhausted, match="read again by weights 2"):
        both.sample(prompt, cached=cached, sent=True)
    (again,) = both.read(ids)
    while both.work():
        pass
    answer = both.sample(again)
    while both.work():
        pass
    assert answer.ids == greedy_of(reference("qwen3", seed=1), ids, 16)


def test_swap_without_memory_for_its_probe_is_repeated(
    both: BothByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights served before stay; the error is one after which a worker tries again."""
    forward = both.policy.forward

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(both.policy, "forward", fail)
    both.swap(2, seed=1)
    assert isinstance(both.outcomes[-1], ResourceExhausted)
    monkeypatch.setattr(both.policy, "forward", forward)
    (prompt,) = both.read(LONG[0])
    while both.work():
        pass
    assert both.held[prompt.request_id].version == 1
    both.swap(2, seed=1)
    assert both.outcomes[-1] is None
