"""In vLLM's process: what an answer needs of the sampler that vLLM does not have.

The first token that prefill has sampled; grammar and penalties of an answer that began elsewhere;
the log-prob of each sampled token in the model's own distribution. Requests ask by `Orders`, in
their `extra_args`. Written for vLLM's first model runner. Not here: grammars and penalties of
answers that begin in this engine, which are vLLM's.

Shape suffixes: R rows, V vocabulary, K log-probs of a row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from vllm import SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.sampler import Sampler

from forge.core.errors import ForgeError
from forge.runtime.telemetry import log
from services.inference.engines.base import Grammar
from services.inference.engines.grammar_masks import (
    MAX_COMPILED,
    GrammarMatcher,
    begin_answer,
    compile_grammar,
    load_tokenizer,
    mask_words,
)
from services.inference.engines.vllm.exchange.orders import ORDERS, OWN, Orders


class _Row:
    """One request in the batch."""

    def __init__(
        self, orders: Orders, prompt: list[int], sampled: list[int], matcher: GrammarMatcher | None
    ) -> None:
        self.orders = orders
        self.failed = False
        self._prompt = prompt
        self._sampled = sampled
        """vLLM's own list: it grows with each step."""
        self._matcher = matcher
        self._matched = 0

    def apply(self, logits_V: torch.Tensor) -> None:
        """Change the logits of the next token in place."""
        orders = self.orders
        if len(self._sampled) < len(orders.first):
            logits_V.fill_(-torch.inf)
            logits_V[orders.first[len(self._sampled)]] = 0.0
            return
        if self._matcher is not None:
            self._mask(self._matcher, logits_V)
        if orders.presence or orders.frequency or orders.repetition != 1:
            self._penalize(logits_V)

    def _last(self, count: int) -> list[int]:
        """The last tokens of the prompt, and all sampled ones."""
        return self._prompt[len(self._prompt) - count :] + self._sampled

    def _mask(self, matcher: GrammarMatcher, logits_V: torch.Tensor) -> None:
        answer = self._last(self.orders.matched)
        for token in answer[self._matched :]:
            matcher.advance(token)
        self._matched = len(answer)
        words = np.zeros(mask_words(len(logits_V)), dtype=np.uint32)
        try:
            matcher.fill(words)
        except ForgeError as error:
            # The worker ends the request: an exception here would end vLLM.
            self.failed = True
            log.warning("grammar_not_followed", error=str(error))
            return
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(logits_V)]
        allowed_V = torch.from_numpy(bits).to(logits_V.device).bool()
        logits_V.masked_fill_(~allowed_V, -torch.inf)

    def _penalize(self, logits_V: torch.Tensor) -> None:
        """As vLLM does it: repetition, frequency, presence."""
        orders = self.orders
        device = logits_V.device
        if orders.repetition != 1:
            seen = torch.unique(torch.tensor(self._prompt + self._sampled, device=device))
            seen_S = logits_V[seen]
            factor = orders.repetition
            logits_V[seen] = torch.where(seen_S > 0, seen_S / factor, seen_S * factor)
        answer = torch.tensor(self._last(orders.answered), dtype=torch.long, device=device)
        counts_V = torch.bincount(answer, minlength=len(logits_V))
        logits_V -= orders.frequency * counts_V + orders.presence * (counts_V > 0)


class AnswerLogits(LogitsProcessor):  # type: ignore[misc]
    """Applies the orders of all requests of the batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, _Row] = {}
        """By their place in the batch."""
        self._model_path: str = vllm_config.model_config.model
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str, bool], LLMatcher] = OrderedDict()

    def is_argmax_invariant(self) -> bool:
        """It changes greedy answers, too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the batch."""
        process_dict_updates(self.rows, batch_update, self._new_row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the orders in place."""
        for place, row in self.rows.items():
            row.apply(logits[place])
        return logits

    def _new_row(
        self, params: SamplingParams, prompt: list[int] | None, sampled: list[int]
    ) -> _Row | None:
        found = (params.extra_args or {}).get(ORDERS)
        if found is None:
            return None
        orders = msgspec.convert(found, Orders)
        return _Row(orders, prompt or [], sampled, self._matcher(orders))

    def _matcher(self, orders: Orders) -> GrammarMatcher | None:
        """The worker has compiled the same grammar, so it cannot fail here."""
        if orders.grammar is None:
            return None
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._model_path, vocabulary=self._vocabulary)
        compiled = self._compiled.get(orders.grammar)
        if compiled is None:
            kind, text, lenient = orders.grammar
            grammar = Grammar(kind=kind, text=text, lenient=lenient)  # type: ignore[arg-type]
            compiled = self._compiled[orders.grammar] = compile_grammar(self._tokenizer, grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(orders.grammar)
        stop_ids = frozenset(orders.stop_ids)
        vocabulary = self._vocabulary
        return begin_answer(compiled, self._tokenizer, stop_ids=stop_ids, vocabulary=vocabulary)


class AnswerSampler(Sampler):  # type: ignore[misc]
    """vLLM's sampler, which also returns log-probs in the model's own distribution."""

    own_logits: torch.Tensor | None = None
    """Logits of this step, before grammars; None if no request asks for them."""

    def forward(
        self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **options: Any
    ) -> SamplerOutput:
        """See `Sampler`."""
        own_logits, self.own_logits = self.own_logits, None
        output = super().forward(logits, sampling_metadata, *args, **options)
        rows = asking(sampling_metadata.logitsprocs)
        if own_logits is not None and rows and output.logprobs_tensors is not None:
            output.logprobs_tensors = _with_own(
                output.logprobs_tensors, rows, own_logits, sampling_metadata.temperature
            )
        return output


def asking(processors: Any) -> dict[int, _Row]:
    """Return the rows of a batch that ask for log-probs in the model's own distribution."""
    found = (one for one in processors.non_argmax_invariant if isinstance(one, AnswerLogits))
    return {place: row for one in found for place, row in one.rows.items() if row.orders.own}


def install(runner: Any) -> None:
    """Give a model runner this sampler. Raises RuntimeError for another runner than that which it
    is written for."""
    before = runner.sampler
    if type(before) is not Sampler:
        raise RuntimeError(f"vLLM's sampler is {type(before).__name__}, expected Sampler")
    sampler = AnswerSampler(
        logprobs_mode=before.logprobs_mode, use_fp64_gumbel=before.use_fp64_gumbel
    )
    compute: Callable[..., Any] = runner.model.compute_logits

    def compute_logits(*args: Any, **options: Any) -> Any:
        logits = compute(*args, **options)
        asked = asking(runner.input_batch.sampling_metadata.logitsprocs)
        # A copy: grammars are applied in place.
        sampler.own_logits = logits.clone() if asked and logits is not None else None
        return logits

    runner.model.compute_logits = compute_logits
    runner.sampler = sampler


def _with_own(
    found: LogprobsTensors,
    rows: dict[int, _Row],
    own_logits_RV: torch.Tensor,
    temperature_R: torch.Tensor | None,
) -> LogprobsTensors:
    """Put the entry `OWN` behind that of the sampled token, in place of the least likely one."""
    ids_RK, logprobs_RK = found.logprob_token_ids.clone(), found.logprobs.clone()
    for place, row in rows.items():
        own = 0.0
        heat = 0.0 if temperature_R is None else float(temperature_R[place])
        if row.failed:
            own = -torch.inf
        # A greedy row has no distribution.
        elif heat > 0:
            scaled_V = own_logits_RV[place].float() / heat
            own = float(scaled_V.log_softmax(-1)[ids_RK[place, 0]])
        for columns_RK, value in ((ids_RK, OWN), (logprobs_RK, own)):
            columns_RK[place, 2:] = columns_RK[place, 1:-1].clone()
            columns_RK[place, 1] = value
    return found._replace(logprob_token_ids=ids_RK, logprobs=logprobs_RK)
