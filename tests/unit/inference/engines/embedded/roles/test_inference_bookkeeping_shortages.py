"""Shortages of memory beside the forward passes: caching, hand-offs, rows, states and draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forge.core.errors import ForgeError, ResourceExhausted
from services.inference.engines.base import Prompt
from tests.contract.engines import Answer, is_greedy, prompt_ids
from tests.support.inference.embedded_actors import BothByHand
from tests.support.suite.matrix import usual

FAMILIES = ("llama", "mamba2", "qwen3", "qwen3_moe", "qwen3_next")
"""Llama has draft heads."""
_MOST = 4


class _Allocations(TorchDispatchMode):
    """Counts operations that allocate, outside forward passes; one of them fails."""

    def __init__(self, both: BothByHand, *, failing: int) -> None:
        super().__init__()
        self.count = 0
        self._failing = failing
        actor: Any = both.actor
        self._passes = ((actor._prefill, "_forward"), (actor._decode._step._pass, "run"))
        self._in_pass = False

    @contextmanager
    def active(self) -> Iterator[_Allocations]:
        with ExitStack() as undo:
            for owner, name in self._passes:
                undo.enter_context(_replaced(owner, name, self._noted(getattr(owner, name))))
            undo.enter_context(self)
            yield self

    def _noted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **named: Any) -> Any:
            self._in_pass = True
            try:
                return run(*given, **named)
            finally:
                self._in_pass = False

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self._in_pass:
            return found
        known = {_storage(one) for one in tree_leaves((args, kwargs)) if _is_tensor(one)}
        new = [one for one in tree_leaves(found) if _is_tensor(one)]
        if any(one.numel() and _storage(one) not in known for one in new):
            self.count += 1
            if self.count == self._failing:
                raise torch.OutOfMemoryError(f"CUDA out of memory in {func}")
        return found


@contextmanager
def _replaced(owner: Any, name: str, method: Any) -> Iterator[None]:
    setattr(owner, name, method)
    try:
        yield
    finally:
        delattr(owner, name)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _finish(both: BothByHand) -> None:
    while both.work():
        pass


def _turn(both: BothByHand, prompts: list[list[int]]) -> list[Answer | None]:
    """Answers to all prompts; None: it has failed, and only for want of memory."""
    asked = both.read(*prompts, most=_MOST)
    _finish(both)
    answers = [_sampled(both, prompt) for prompt in asked]
    _finish(both)
    for number, prompt in enumerate(asked):
        error = both.failures.pop(prompt.request_id, None)
        if error is not None:
            assert isinstance(error, ResourceExhausted), error
            answers[number] = None
    return answers


def _sampled(both: BothByHand, prompt: Prompt) -> Answer | None:
    if prompt.request_id not in both.held:
        return None
    try:
        return both.sample(prompt, sent=True)
    except ForgeError as error:
        assert isinstance(error, ResourceExhausted)
        return None


def _check(both: BothByHand, prompts: list[list[int]], answers: list[Answer | None]) -> None:
    reference = both.reference()
    for ids, answer in zip(prompts, answers, strict=True):
        if answer is not None:
            assert len(answer.ids) == _MOST
            assert is_greedy(reference, ids, answer.ids)


def _group(seed: int) -> list[list[int]]:
    shared = prompt_ids(64, seed=seed)
    return [shared + prompt_ids(5 + number, seed=seed + 1 + number) for number in range(2)]


@pytest.mark.parametrize("family", usual(FAMILIES, "llama", "qwen3_moe", "qwen3_next"))
def test_shortage_of_memory_beside_a_pass_ends_no_other_request(
    family: str, tmp_path: Path
) -> None:
    """Wherever it comes: the answers stay greedy, a request may end with RESOURCE_EXHAUSTED, and
    the cached prefixes are right for the next turn."""
    drafts = family == "llama"
    options: dict[str, Any] = {"draft_tokens": 2, "adaptive_drafts": False} if drafts else {}
    both = BothByHand(tmp_path, family, drafts=drafts, **options)
    failing = 0
    while True:
        failing += 1
        prompts = _group(10 * failing)
        with _Allocations(both, failing=failing).active() as allocations:
            answers = _turn(both, prompts)
        if allocations.count < failing:
            break
        _check(both, prompts, answers)
        turns = [
            ids + ([] if answer is None else answer.ids) + prompt_ids(3, seed=failing)
            for ids, answer in zip(prompts, answers, strict=True)
        ]
        again = _turn(both, turns)
        assert None not in again
        _check(both, turns, again)
    assert failing > 10
    both.swap(2)
    actor: Any = both.actor
    assert actor._decode._cache.tokens == 0
