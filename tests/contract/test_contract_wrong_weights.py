"""Weights that compute no numbers, or other ones than at the trainer: never served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from forge.core.named_tensor import NamedTensor
from services.inference.engines.base import BrokenWeights, Engine, Probe, UnfitWeights
from tests.contract import engines
from tests.contract.engines import GREEDY, Pair, prompt_ids, published, reference
from tests.contract.starts import serving
from tests.support.inference.held_answers import held_answers
from tests.support.inference.transformers_answers import greedy_of, logprobs_of

pytestmark = pytest.mark.matrix


@pytest.fixture(params=engines.ENGINES)
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    async with serving(engines.ENGINES[request.param], tmp_path) as started:
        yield started


def probe_of(model: Any) -> Probe:
    """What a trainer publishes with these weights."""
    ids = prompt_ids(16, seed=3)
    logprobs = logprobs_of(model, ids[:1], ids[1:])
    return Probe(ids=tuple(ids), logprobs=tuple(logprobs.tolist()))


def with_one_nan(good: dict[str, NamedTensor], name: str) -> dict[str, NamedTensor]:
    """In the last element, a part that few tokens read."""
    data = bytes(good[name].data)[:-4] + b"\xff" * 4
    return good | {name: replace(good[name], data=data)}


async def test_weights_with_nan_are_refused(pair: Pair) -> None:
    """Everywhere or in one element: the version before stays in service, also for a request in
    flight; the next good weights take effect."""
    good = published(reference("qwen3"))
    nothing = {name: replace(t, data=b"\xff" * len(t.data)) for name, t in good.items()}
    one_nan = with_one_nan(good, "model.embed_tokens.weight")
    ids = prompt_ids(20)
    refused = 0

    async def load(answer: engines.Answer) -> None:
        nonlocal refused
        if refused:
            return
        for broken in (nothing, one_nan):
            for engine in (pair.prefill, pair.decode):
                with pytest.raises(BrokenWeights):
                    await engine.load(broken, version=2)
                refused += 1
        held.free()

    with held_answers(200) as held:
        answer = await pair.sample(ids, replace(GREEDY, max_tokens=400), on_piece=load)
    assert refused == 4
    assert set(answer.versions) == {1}
    assert answer.ids[:16] == greedy_of(reference("qwen3"), ids, 16)
    assert pair.prefill.status().version == pair.decode.status().version == 1
    new = reference("qwen3", seed=1)
    await pair.load(published(new), version=3)
    assert (await pair.sample(ids)).ids == greedy_of(new, ids, 16)


async def test_weights_of_another_type_are_refused(pair: Pair) -> None:
    """Their bytes are complete and their digest is right: float16 under the name bfloat16, integers
    in place of numbers, and weights that compute something else than at the trainer."""
    new = reference("qwen3", seed=1)
    good, probe = published(new), probe_of(new)
    half = published(reference("qwen3", seed=1).half())
    mislabelled = {name: replace(t, dtype="bfloat16") for name, t in half.items()}
    integers = {name: replace(t, dtype="int32") for name, t in good.items()}
    other = published(reference("qwen3", seed=2))
    for wrong in (mislabelled, integers, other):
        for engine in (pair.prefill, pair.decode):
            with pytest.raises((UnfitWeights, BrokenWeights)):
                await engine.load(wrong, version=2, probe=probe)
    ids = prompt_ids(20)
    assert (await pair.sample(ids)).ids == greedy_of(reference("qwen3"), ids, 16)
    for version, right in enumerate((good, half), start=3):
        for engine in (pair.prefill, pair.decode):
            await engine.load(right, version=version, probe=probe)
    assert torch.isfinite(torch.tensor((await pair.sample(ids)).logprobs)).all()


class NotedTuple(tuple[float, ...]):
    """Calls `note` when its numbers are read."""

    note: Callable[[], None]

    @classmethod
    def of(cls, numbers: Iterable[float], note: Callable[[], None]) -> Self:
        made = cls(numbers)
        made.note = note
        return made

    def __iter__(self) -> Iterator[float]:
        self.note()
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        found: Any = super().__getitem__(key)
        return self.of(found, self.note) if isinstance(key, slice) else found


async def test_weights_on_trial_are_not_in_service(pair: Pair) -> None:
    """While an engine compares them with their probe, its status has the version before: its cached
    prefixes belong to that version."""
    new = reference("qwen3", seed=1)
    right = probe_of(new)
    for engine in {pair.prefill, pair.decode}:
        seen: list[int] = []

        def note(engine: Engine = engine, seen: list[int] = seen) -> None:
            seen.append(engine.status().version)

        await engine.load(
            published(new),
            version=2,
            probe=replace(right, logprobs=NotedTuple.of(right.logprobs, note)),
        )
        assert seen
        assert set(seen) == {1}
        assert engine.status().version == 2


@pytest.mark.parametrize(("half", "error"), [(False, 0.002), (True, 0.3)])
async def test_all_engines_have_one_limit_for_the_probe(
    pair: Pair, half: bool, error: float
) -> None:
    """In float32, and in 16 bits, whose rounding is larger: a mean error above the limit refuses
    the weights, also one of less than half a nat. The worker's setting for this kind of numbers
    takes its place, and the one for the other kind does not."""
    new = reference("qwen3", seed=1)
    right = probe_of(new)
    wrong = replace(right, logprobs=tuple(one + error for one in right.logprobs))
    loaded = published(new.half() if half else new)
    for engine in (pair.prefill, pair.decode):
        wide, exact = (
            replace(wrong, most_error=2 * error),
            replace(wrong, most_exact_error=2 * error),
        )
        own, other = (wide, exact) if half else (exact, wide)
        setting = "probe_error" if half else "probe_exact_error"
        for refused in (wrong, other):
            with pytest.raises(UnfitWeights, match=rf"\(mean\), more than .* {setting} changes"):
                await engine.load(loaded, version=2, probe=refused)
        await engine.load(loaded, version=3, probe=own)


async def test_probe_beyond_the_model_is_refused(pair: Pair) -> None:
    """Of more tokens than the context, and of tokens beyond the vocabulary."""
    good = published(reference("qwen3"))
    long = Probe(ids=(1,) * (engines.CONTEXT_TOKENS + 1), logprobs=(-1.0,) * engines.CONTEXT_TOKENS)
    unknown = Probe(ids=(1, engines.VOCABULARY), logprobs=(-1.0,))
    for probe in (long, unknown):
        for engine in (pair.prefill, pair.decode):
            with pytest.raises(UnfitWeights, match="their probe has"):
                await engine.load(good, version=2, probe=probe)


async def test_nan_at_run_time_fails_only_its_requests(pair: Pair) -> None:
    """Weights that break after they were checked: nothing of theirs is cached."""
    if pair.capabilities.engine != "embedded":
        pytest.skip("the test breaks tensors of this process; other engines have theirs elsewhere")
    ids = prompt_ids(20)
    expected = await pair.sample(ids)
    policy: Any = pair.decode._policy  # type: ignore[attr-defined]
    kept = [weight.tensor.data.clone() for weight in policy._weights]

    async def break_decode(answer: engines.Answer) -> None:
        for weight in policy._weights:
            weight.tensor.data.fill_(torch.nan)
        held.free()

    with held_answers(200) as held, pytest.raises(BrokenWeights):
        await pair.sample(ids, replace(GREEDY, max_tokens=400), on_piece=break_decode)
    for weight, data in zip(policy._weights, kept, strict=True):
        weight.tensor.data.copy_(data)
    assert (await pair.sample(ids)).ids == expected.ids
