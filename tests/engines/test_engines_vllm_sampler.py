"""What Forge adds to vLLM's sampler: all rows of a batch at once, as row by row.

Runs in the environment of `make engine-vllm` alone: `make test-engines`.
"""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.inference.engines.base import Grammar
from services.inference.engines.grammar_masks import (
    begin_answer,
    compile_grammar,
    load_tokenizer,
    mask_words,
)
from services.inference.engines.vllm.exchange.orders import OWN, Orders
from tests.contract import engines
from tests.contract.engines import END, VOCABULARY, save_tokenizer

pytestmark = pytest.mark.skipif(not engines.ON_VLLM, reason="runs by `make test-engines`")
GRAMMAR = ("regex", "[a-z]{3,9}", False)
LETTERS = [1 + ord(one) - 33 for one in "abcdef"]
PROMPT = [7, 7, 9, 30, *LETTERS[:2]]
ORDERS = [
    Orders(own=True, scale=4.0),
    Orders(first=(5,), frequency=1.0, answered=2),
    Orders(own=True, grammar=GRAMMAR, matched=2, stop_ids=(END,)),
    Orders(presence=0.7, frequency=0.3, answered=3),
    Orders(own=True, repetition=1.4, answered=2),
    Orders(grammar=GRAMMAR, matched=2, stop_ids=(END,), presence=0.5, repetition=0.8, answered=2),
    Orders(first=(3, 8), grammar=GRAMMAR, stop_ids=(END,)),
]
SAMPLED = [[], [], [LETTERS[3]], [7, 7], [9], [LETTERS[4], LETTERS[4]], [3]]


class Operations(TorchDispatchMode):
    """Counts the operations on tensors in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def module() -> Any:
    return import_module("services.inference.engines.vllm.engine_core.answer_logits")


def processor(module: Any, folder: Path, *, copies: int = 1) -> Any:
    """The processor of a batch with these orders, so many times; the first row has none."""
    save_tokenizer(folder)
    model = SimpleNamespace(model=str(folder), get_vocab_size=lambda: VOCABULARY)
    made = module.AnswerLogits(SimpleNamespace(model_config=model), torch.device("cpu"), False)
    added = [
        (1 + place, SimpleNamespace(extra_args=orders.extra_args()), PROMPT, list(sampled))
        for place, (orders, sampled) in enumerate(
            zip(ORDERS * copies, SAMPLED * copies, strict=True)
        )
    ]
    made.update_state(SimpleNamespace(added=added, removed=[], moved=[]))
    return made


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 4


def changed(orders: Orders, sampled: list[int], logits_V: torch.Tensor, folder: Path) -> None:
    """One row, by the rules alone, in place."""
    if len(sampled) < len(orders.first):
        logits_V.fill_(-torch.inf)
        logits_V[orders.first[len(sampled)]] = 0.0
        return
    if orders.grammar is not None:
        tokenizer = load_tokenizer(str(folder), vocabulary=VOCABULARY)
        kind, text, lenient = orders.grammar
        grammar = Grammar(kind=kind, text=text, lenient=lenient)  # type: ignore[arg-type]
        compiled, stop_ids = compile_grammar(tokenizer, grammar), frozenset(orders.stop_ids)
        matcher = begin_answer(compiled, tokenizer, stop_ids=stop_ids, vocabulary=VOCABULARY)
        for token in PROMPT[len(PROMPT) - orders.matched :] + sampled:
            matcher.advance(token)
        words = np.zeros(mask_words(VOCABULARY), dtype=np.uint32)
        matcher.fill(words)
        for token in range(VOCABULARY):
            if not int(words[token // 32]) >> token % 32 & 1:
                logits_V[token] = -torch.inf
    answer = PROMPT[len(PROMPT) - orders.answered :] + sampled
    for token in {*PROMPT, *sampled}:
        positive = logits_V[token] > 0
        logits_V[token] *= 1 / orders.repetition if positive else orders.repetition
    for token, count in Counter(answer).items():
        logits_V[token] -= orders.frequency * count + orders.presence


def test_batch_is_changed_as_row_by_row(module: Any, tmp_path: Path) -> None:
    """First tokens, grammars and penalties of answers that began elsewhere, in one batch; a row
    without orders stays as it is."""
    made, before = processor(module, tmp_path), logits_of(1 + len(ORDERS))
    expected = before.clone()
    for place, (orders, sampled) in enumerate(zip(ORDERS, SAMPLED, strict=True)):
        changed(orders, sampled, expected[1 + place], tmp_path)
    found = made.apply(before.clone())
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
    unchanged = [0, 1]
    assert torch.equal(found[unchanged], before[unchanged])


def test_penalties_follow_the_answer_and_the_batch(module: Any, tmp_path: Path) -> None:
    """Tokens that vLLM samples count from the next step on; a request that takes another place
    keeps its own."""
    made = processor(module, tmp_path)
    made.apply(logits_of(1 + len(ORDERS)))
    row = made.rows[4]
    row._sampled.append(11)
    expected = logits_of(9)
    changed(row.orders, row._sampled, expected[8], tmp_path)
    direct = import_module("vllm.v1.sample.logits_processor.interface").MoveDirectionality
    moved = [(4, 8, direct.UNIDIRECTIONAL)]
    made.update_state(SimpleNamespace(added=[], removed=[], moved=moved))
    found = made.apply(logits_of(9))
    assert torch.allclose(found[8], expected[8], rtol=1e-6, atol=1e-6)
    assert torch.equal(found[4], logits_of(9)[4])


def test_grammar_that_no_token_follows_is_marked(module: Any, tmp_path: Path) -> None:
    """Its row keeps its logits, and the other rows of the batch their masks."""
    made = processor(module, tmp_path)
    broken = made.rows[3]
    broken._sampled[:] = [2]
    before = logits_of(1 + len(ORDERS))
    found = made.apply(before.clone())
    assert [place for place, row in made.rows.items() if row.failed] == [3]
    assert torch.equal(found[3], before[3])
    assert found[6].isinf().any()


def test_logits_are_scaled_in_their_own_rows(module: Any, tmp_path: Path) -> None:
    """For temperatures that vLLM does not have."""
    found, before = logits_of(1 + len(ORDERS)), logits_of(1 + len(ORDERS))
    module._rescale(found, processor(module, tmp_path).rows)
    assert torch.equal(found[1], before[1] * 4)
    before[1] = found[1]
    assert torch.equal(found, before)


def own_of(module: Any, made: Any, temperature: torch.Tensor | None, rows: int) -> Any:
    tensors = import_module("vllm.v1.outputs").LogprobsTensors
    draws = torch.Generator().manual_seed(1)
    found = tensors(
        torch.randint(0, VOCABULARY, (rows, 4), dtype=torch.int32, generator=draws),
        torch.rand(rows, 4, generator=draws),
        torch.zeros(rows, dtype=torch.int32),
    )
    asked = {place: row for place, row in made.rows.items() if row.orders.own}
    return found, module._with_own(found, asked, logits_of(rows), temperature), asked


def test_own_logprobs_are_those_of_each_row(module: Any, tmp_path: Path) -> None:
    """At its temperature; 0 for greedy rows, -inf for a grammar that cannot be followed. Rows that
    do not ask keep their columns."""
    made, rows = processor(module, tmp_path), 1 + len(ORDERS)
    made.rows[3].failed = True
    temperature = torch.tensor([1.0, 0.7, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    before, found, asked = own_of(module, made, temperature, rows)
    assert sorted(asked) == [1, 3, 5]
    token = before.logprob_token_ids[1, 0]
    drawn = (logits_of(rows)[1] * 4 / 0.7).log_softmax(-1)[token]
    assert torch.allclose(found.logprobs[[1, 3, 5], 1], torch.tensor([drawn, -torch.inf, 0.0]))
    for place in range(rows):
        for new, old in (
            (found.logprobs[place], before.logprobs[place]),
            (found.logprob_token_ids[place], before.logprob_token_ids[place]),
        ):
            if place in asked:
                assert torch.equal(new[[0, 2, 3]], old[[0, 1, 2]])
            else:
                assert torch.equal(new, old)
    assert (found.logprob_token_ids[[1, 3, 5], 1] == OWN).all()
    _, greedy, _ = own_of(module, processor(module, tmp_path), None, rows)
    assert not greedy.logprobs[[1, 3, 5], 1].any()


def test_number_of_operations_does_not_depend_on_rows(module: Any, tmp_path: Path) -> None:
    """And no value is read from the device: on a GPU each would stop the step."""
    counts = []
    for copies in (1, 3):
        made, rows = processor(module, tmp_path, copies=copies), 1 + copies * len(ORDERS)
        with Operations() as operations:
            made.apply(logits_of(rows))
            module._rescale(logits_of(rows), made.rows)
            own_of(module, made, torch.ones(rows), rows)
        counts.append(operations.counts)
    assert counts[0] == counts[1]
    assert not [name for name in counts[0] if "_local_scalar_dense" in name or "nonzero" in name]
