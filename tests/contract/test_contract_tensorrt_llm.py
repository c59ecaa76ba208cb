"""The contract on the TensorRT-LLM engine, as far as it declares the ability, on its stand-in.

It lacks: draws by position, grammars, minimal lengths, penalties, kept shares, keys and values as
bytes, and exact counts of cached tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.inference.engines.tensorrt_llm.arguments import Role
from tests.contract import (
    test_contract_engines,
    test_contract_passes,
    test_contract_top_logprobs,
    test_contract_wrong_weights,
)
from tests.contract.engines import Pair, published, reference
from tests.support.inference.tensorrt_llm import both, started
from tests.support.inference.tensorrt_llm_fake.behaviour import Behaviour, behaving

ON_A_PAIR = [
    test_contract_engines.test_logprobs_equal_those_of_a_full_forward,
    test_contract_engines.test_logprobs_are_of_the_sampled_distribution,
    test_contract_engines.test_seed_determines_the_answer,
    test_contract_engines.test_stop_token_ends_the_answer_and_is_kept,
    test_contract_engines.test_answer_ends_at_the_context_limit,
    test_contract_engines.test_swap_in_mid_answer_changes_the_version_of_later_tokens,
    test_contract_engines.test_unfit_weights_change_nothing,
    test_contract_engines.test_released_prompt_is_not_found,
    test_contract_engines.test_prefix_cache_changes_no_result,
    test_contract_engines.test_equal_prompts_are_prefilled_once,
    test_contract_wrong_weights.test_weights_with_nan_are_refused,
    test_contract_wrong_weights.test_weights_of_another_type_are_refused,
    test_contract_top_logprobs.test_top_logprobs_equal_those_of_a_full_forward,
    test_contract_top_logprobs.test_top_logprobs_omit_tokens_of_cuts,
]
STARTED = [
    test_contract_engines.test_abort_frees_the_slot,
    test_contract_engines.test_more_requests_than_slots_all_finish,
    test_contract_engines.test_request_without_weights_is_unavailable,
    test_contract_passes.test_prompts_longer_than_a_pass_are_prefilled_in_chunks,
]
Start = Callable[..., AbstractAsyncContextManager[Pair]]


@asynccontextmanager
async def one_engine(model_path: Path, **options: Any) -> AsyncIterator[Pair]:
    """An engine of the role both."""
    async with started(model_path, Role.BOTH, **options) as engine:
        yield both(engine)


@asynccontextmanager
async def two_engines(model_path: Path, **options: Any) -> AsyncIterator[Pair]:
    """A prefill and a decode engine."""
    async with (
        started(model_path, Role.PREFILL, **options) as prefill,
        started(model_path, Role.DECODE, **options) as decode,
    ):
        yield Pair(prefill=prefill, decode=decode)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a pair on the Qwen3-type model; a misuse of the library fails the test."""
    reference("qwen3").save_pretrained(tmp_path)
    return lambda **options: _strict(two_engines(tmp_path, **options))


@pytest.fixture
def start_one(tmp_path: Path) -> Start:
    """As `start`, one engine in the role both."""
    reference("qwen3").save_pretrained(tmp_path)
    return lambda **options: _strict(one_engine(tmp_path, **options))


@asynccontextmanager
async def _strict(inner: AbstractAsyncContextManager[Pair]) -> AsyncIterator[Pair]:
    with behaving(Behaviour()):
        async with inner as pair:
            yield pair


@pytest.mark.parametrize("test", ON_A_PAIR, ids=lambda test: test.__name__)
async def test_engine_keeps_the_contract(start: Start, test: Callable[..., Any]) -> None:
    """Log-probs, seeds, stops, limits, swaps and refusals are those of every engine."""
    async with start() as pair:
        await pair.load(published(reference("qwen3")), version=1)
        await test(pair)


@pytest.mark.parametrize("test", STARTED, ids=lambda test: test.__name__)
async def test_engine_keeps_the_contract_of_its_limits(
    start_one: Start, test: Callable[..., Any]
) -> None:
    """Slots, aborts, chunks and the time before the first weights are those of every engine."""
    await test(start_one)


async def test_top_logprobs_are_those_of_a_full_forward(start: Start) -> None:
    """Also of the first token, which prefill samples."""
    async with start() as pair:
        await pair.load(published(reference("qwen3")), version=1)
        await test_contract_top_logprobs.test_top_logprobs_change_no_draw(pair)
