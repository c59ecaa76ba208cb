"""Passes that run out of memory: what is repeated, what fails, and the answers afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.core.errors import ResourceExhausted
from services.inference.engines.embedded.metrics import MEMORY_SHORTAGES
from tests.contract.engines import Answer, is_greedy, prompt_ids
from tests.support.inference.embedded_actors import BothByHand

FAMILIES = ["qwen3", "qwen3_moe", "qwen3_next", "falcon_h1", "mamba2"]
GROUP = [prompt_ids(64, seed=1) + prompt_ids(9 + number, seed=10 + number) for number in range(4)]
LONG = prompt_ids(300, seed=5)


@contextmanager
def memory_for(both: BothByHand, tokens: int, *, error: Exception | None = None) -> Iterator[None]:
    """Passes with more tokens fail in the model's last layer, when all others have stored their
    keys, values and states."""
    model: Any = both.policy.module
    last = model.base_model.layers[-1]

    def check(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        if arguments[0].shape[1] > tokens:
            raise error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    hook = last.register_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def finish(both: BothByHand) -> None:
    while both.work():
        pass


def answers_to(both: BothByHand, *prompts: list[int]) -> list[Answer]:
    asked = both.read(*prompts)
    finish(both)
    answers = [both.sample(prompt) for prompt in asked]
    finish(both)
    return answers


def counted(work: str, outcome: str) -> float:
    found: float = MEMORY_SHORTAGES.labels(work, outcome)._value.get()
    return found


def check_greedy(both: BothByHand, prompts: list[list[int]], answers: list[Answer]) -> None:
    assert not both.failures
    for ids, answer in zip(prompts, answers, strict=True):
        assert len(answer.ids) == 16
        assert is_greedy(both.reference(), ids, answer.ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_computed_in_smaller_passes(family: str, tmp_path: Path) -> None:
    """A group with a shared prefix, and a long prompt; later turns continue what is cached."""
    both = BothByHand(tmp_path, family, pass_tokens=256)
    before = counted("prefill", "split")
    with memory_for(both, 40):
        prompts = [*GROUP, LONG]
        asked = both.read(*prompts)
        finish(both)
    assert counted("prefill", "split") > before
    answers = [both.sample(prompt) for prompt in asked]
    finish(both)
    check_greedy(both, prompts, answers)
    turns = [
        ids + answer.ids + prompt_ids(5, seed=3)
        for ids, answer in zip(prompts, answers, strict=True)
    ]
    check_greedy(both, turns, answers_to(both, *turns))


def test_smallest_pass_without_memory_ends_the_request_alone(tmp_path: Path) -> None:
    """The error names its size and the setting to lower; the next request is answered."""
    both = BothByHand(tmp_path, pass_tokens=256)
    before = counted("prefill", "refused")
    with memory_for(both, 8):
        (prompt,) = both.read(LONG)
        finish(both)
    error = both.failures.pop(prompt.request_id)
    assert isinstance(error, ResourceExhausted)
    assert "a prompt of 300 tokens" in str(error) and "kv.mib" in str(error)
    assert counted("prefill", "refused") == before + 1
    check_greedy(both, [LONG], answers_to(both, LONG))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_decode_step_is_computed_in_parts(family: str, tmp_path: Path) -> None:
    """Sequences of several length classes, with a shared prefix; all answers stay greedy."""
    both = BothByHand(tmp_path, family)
    prompts = [*GROUP, LONG, prompt_ids(20, seed=7)]
    asked = both.read(*prompts)
    finish(both)
    answers = [both.sample(prompt) for prompt in asked]
    both.work()
    before = counted("decode", "split")
    with memory_for(both, 2):
        finish(both)
    assert counted("decode", "split") == before + 2
    check_greedy(both, prompts, answers)


def test_drafts_are_left_out_of_a_step_without_memory(tmp_path: Path) -> None:
    """They come back later."""
    both = BothByHand(tmp_path, "llama", drafts=True, draft_tokens=3, adaptive_drafts=False)
    asked = both.read(*GROUP)
    finish(both)
    answers = [both.sample(prompt) for prompt in asked]
    with memory_for(both, 4):
        finish(both)
    check_greedy(both, GROUP, answers)


def test_only_the_sequence_that_fails_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose pass fails at any size, beside three others; the others run together again."""
    monkeypatch.setattr("services.inference.engines.embedded.sequences.STREAM_INTERVAL_S", 0.0)
    both = BothByHand(tmp_path)
    asked = both.read(*GROUP)
    finish(both)
    answers = [both.sample(prompt) for prompt in asked]
    both.work()
    guilty = answers[2].ids[-1]
    sizes: list[int] = []

    def check(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        ids = arguments[0].flatten().tolist()
        sizes.append(len(ids))
        if guilty in ids:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    model: Any = both.policy.module
    hook = model.get_input_embeddings().register_forward_pre_hook(check)
    both.work()
    hook.remove()
    both.work()
    assert len(both.actor._decode._running) == 3  # type: ignore[attr-defined]
    finish(both)
    error = both.failures.pop(asked[2].request_id)
    assert isinstance(error, ResourceExhausted)
    assert "tokens of prompt and answer" in str(error)
    assert sizes[0] == 4
    rest = [0, 1, 3]
    check_greedy(both, [GROUP[number] for number in rest], [answers[number] for number in rest])


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "mamba2"])
def test_requests_whose_states_a_failed_step_changed_are_read_again(
    family: str, tmp_path: Path
) -> None:
    """They go back with their tokens so far; read again, they run in smaller passes."""
    both = BothByHand(tmp_path, family)
    asked = both.read(*GROUP)
    finish(both)
    answers = [both.sample(prompt) for prompt in asked]
    for _ in range(3):
        both.work()
    with memory_for(both, 2):
        both.work()
        assert all(
            isinstance(both.failures.pop(prompt.request_id), ResourceExhausted) for prompt in asked
        )
    resumed = [ids + answer.ids for ids, answer in zip(GROUP, answers, strict=True)]
    assert all(len(answer.ids) > 1 for answer in answers)
    asked = both.read(*resumed)
    finish(both)
    again = [both.sample(prompt) for prompt in asked]
    with memory_for(both, 2):
        finish(both)
    check_greedy(both, resumed, again)


def test_other_errors_end_the_engine(tmp_path: Path) -> None:
    """A defect is no shortage of memory."""
    both = BothByHand(tmp_path)
    both.read(LONG)
    with memory_for(both, 8, error=RuntimeError("shape mismatch")), pytest.raises(RuntimeError):
        finish(both)


def test_prompt_that_copies_from_a_refused_one_computes_its_prefix(tmp_path: Path) -> None:
    """The refused prompt is the oldest of a group."""
    both = BothByHand(tmp_path, pass_tokens=256)
    asked = both.read(*GROUP)
    guilty = GROUP[0][-1]
    assert all(guilty not in ids for ids in GROUP[1:])

    def check(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        if guilty in arguments[0].flatten().tolist():
            raise MemoryError

    model: Any = both.policy.module
    hook = model.get_input_embeddings().register_forward_pre_hook(check)
    finish(both)
    hook.remove()
    assert set(both.failures) == {asked[0].request_id}
    both.failures.clear()
    answers = [both.sample(prompt) for prompt in asked[1:]]
    finish(both)
    check_greedy(both, GROUP[1:], answers)
