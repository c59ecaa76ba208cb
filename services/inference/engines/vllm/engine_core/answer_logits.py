"""In vLLM's process: what an answer needs of the sampler that vLLM does not have.

The first token that prefill has sampled; grammar and penalties of an answer that began elsewhere;
temperatures beyond vLLM's bounds; the log-prob of each sampled token in the model's own
distribution. Requests ask by `Orders`, in their `extra_args`. Written for vLLM's first model
runner. Not here: grammars and penalties of answers that begin in this engine, which are vLLM's.

Shape suffixes: R rows, A rows that ask for the log-prob in their own distribution, V vocabulary, K
log-probs of a row, T tokens, W words of a mask, B its bytes.
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
from vllm.utils.torch_utils import async_tensor_h2d, make_tensor_with_pad
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.sampler import Sampler

from forge.core.errors import ForgeError
from forge.runtime.telemetry import log
from services.inference.engines.base import Grammar
from services.inference.engines.grammar_masks import (
    MAX_COMPILED,
    GrammarMatcher,
    Words,
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
        self.follows_grammar = matcher is not None
        self._prompt = prompt
        self._sampled = sampled
        """vLLM's own list: it grows with each step."""
        self._matcher = matcher
        self._matched = 0

    @property
    def forced(self) -> int | None:
        """The next token, if prefill has sampled it."""
        first = self.orders.first
        return first[len(self._sampled)] if len(self._sampled) < len(first) else None

    @property
    def is_penalized(self) -> bool:
        """Whether penalties change its logits."""
        orders = self.orders
        return bool(orders.presence or orders.frequency or orders.repetition != 1)

    def before(self) -> list[int]:
        """Return the tokens of the prompt before the answer."""
        return self._prompt[: len(self._prompt) - self.orders.answered]

    def answer(self) -> list[int]:
        """Return the tokens that presence and frequency count."""
        return self._last(self.orders.answered)

    def _last(self, count: int) -> list[int]:
        """The last tokens of the prompt, and all sampled ones."""
        return self._prompt[len(self._prompt) - count :] + self._sampled

    def fill(self, words: Words) -> None:
        """Write the tokens that its grammar allows; all of them once it cannot be followed."""
        if self._matcher is None:
            return
        answer = self._last(self.orders.matched)
        for token in answer[self._matched :]:
            self._matcher.advance(token)
        self._matched = len(answer)
        try:
            self._matcher.fill(words)
        except ForgeError as error:
            # The worker ends the request: an exception here would end vLLM.
            self.failed = True
            words[:] = ~np.uint32(0)
            log.warning("grammar_not_followed", error=str(error))


class _Penalized:
    """The rows of a batch with penalties, on its device."""

    def __init__(self, rows: dict[int, _Row], vocabulary: int, device: torch.device) -> None:
        self.rows = {place: row for place, row in rows.items() if row.is_penalized}
        orders = [row.orders for row in self.rows.values()]
        self.places_R = async_tensor_h2d([*self.rows], device, torch.long)
        before = [row.before() for row in self.rows.values()]
        before_RT = make_tensor_with_pad(before, vocabulary, torch.long, device="cpu")
        self.before_RT = async_tensor_h2d(before_RT, device)
        """Padded with a token that the vocabulary does not have."""
        self.presence_R = _floats([one.presence for one in orders], device)
        self.frequency_R = _floats([one.frequency for one in orders], device)
        self.repetition_R = _floats([one.repetition for one in orders], device)

    def apply(self, logits_RV: torch.Tensor) -> None:
        """Change the logits in place."""
        if not self.rows:
            return
        logits_RV[self.places_R] = apply_all_penalties(
            logits_RV[self.places_R],
            self.before_RT,
            self.presence_R,
            self.frequency_R,
            self.repetition_R,
            [row.answer() for row in self.rows.values()],
        )


def _floats(values: list[float], device: torch.device) -> torch.Tensor:
    made: torch.Tensor = async_tensor_h2d(values, device, torch.float32)
    return made


def _mask(logits_RV: torch.Tensor, rows: dict[int, _Row]) -> None:
    """Remove tokens that grammars do not allow, in place."""
    if not rows:
        return
    vocabulary, device = logits_RV.shape[1], logits_RV.device
    words_RW = np.zeros((len(rows), mask_words(vocabulary)), dtype=np.uint32)
    for words_W, row in zip(words_RW, rows.values(), strict=True):
        row.fill(words_W)
    bytes_RB = async_tensor_h2d(words_RW.view(np.uint8), device)
    # The lowest bit is the first token's.
    bits_RB8 = bytes_RB[..., None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
    removed_RV = bits_RB8.flatten(1)[:, :vocabulary] == 0
    places_R = async_tensor_h2d([*rows], device, torch.long)
    logits_RV[places_R] = logits_RV[places_R].masked_fill(removed_RV, -torch.inf)


def _force(logits_RV: torch.Tensor, tokens: dict[int, int]) -> None:
    """Leave one token to each of these rows, in place."""
    if not tokens:
        return
    device = logits_RV.device
    places_R = async_tensor_h2d([*tokens], device, torch.long)
    logits_RV[places_R] = -torch.inf
    logits_RV[places_R, async_tensor_h2d([*tokens.values()], device, torch.long)] = 0.0


class AnswerLogits(LogitsProcessor):  # type: ignore[misc]
    """Applies the orders of all requests of the batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, _Row] = {}
        """By their place in the batch."""
        self._penalized: _Penalized | None = None
        """None after a change of the batch."""
        self._model_path: str = vllm_config.model_config.model
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str, bool], LLMatcher] = OrderedDict()

    def is_argmax_invariant(self) -> bool:
        """It changes greedy answers, too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the batch."""
        if process_dict_updates(self.rows, batch_update, self._new_row):
            self._penalized = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the orders in place, to all rows at once: on a GPU each value that the host reads
        or copies row by row would stop the step."""
        forced = {p: token for p, row in self.rows.items() if (token := row.forced) is not None}
        free = {place: row for place, row in self.rows.items() if place not in forced}
        _mask(logits, {place: row for place, row in free.items() if row.follows_grammar})
        if self._penalized is None:
            self._penalized = _Penalized(self.rows, logits.shape[1], logits.device)
        self._penalized.apply(logits)
        _force(logits, forced)
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
    """vLLM's sampler, with any temperature, which also returns log-probs in the model's own
    distribution."""

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

    def sample(
        self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Sampler`: it comes after penalties and before temperatures."""
        _rescale(logits, _rows(sampling_metadata.logitsprocs))
        found: tuple[torch.Tensor, torch.Tensor | None] = super().sample(
            logits, sampling_metadata, *args, **options
        )
        return found


def _rescale(logits_RV: torch.Tensor, rows: dict[int, _Row]) -> None:
    """Apply `Orders.scale` in place."""
    scales = {place: row.orders.scale for place, row in rows.items() if row.orders.scale != 1}
    if scales:
        device = logits_RV.device
        places_R = async_tensor_h2d([*scales], device, torch.long)
        scaled_RV = logits_RV[places_R] * _floats([*scales.values()], device)[:, None]
        logits_RV.index_copy_(0, places_R, scaled_RV)


def asking(processors: Any) -> dict[int, _Row]:
    """Return the rows of a batch that ask for log-probs in the model's own distribution."""
    return {place: row for place, row in _rows(processors).items() if row.orders.own}


def _rows(processors: Any) -> dict[int, _Row]:
    """Return the rows of a batch that have orders."""
    found = (one for one in processors.non_argmax_invariant if isinstance(one, AnswerLogits))
    return {place: row for one in found for place, row in one.rows.items()}


def install(runner: Any) -> None:
    """Give a model runner this sampler. Raises RuntimeError for another kind of runner."""
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
    device = own_logits_RV.device
    places_A = async_tensor_h2d([*rows], device, torch.long)
    ids_RK, logprobs_RK = found.logprob_token_ids.clone(), found.logprobs.clone()
    own_A = torch.zeros(len(rows), device=device)
    # A greedy row has no distribution.
    if temperature_R is not None:
        scales = [row.orders.scale for row in rows.values()]
        heat_A1 = (temperature_R[places_A] / _floats(scales, device))[:, None]
        drawn_A1 = heat_A1 > 0
        scaled_AV = own_logits_RV[places_A].float() / heat_A1.where(drawn_A1, 1.0)
        sampled_A1 = ids_RK[places_A, :1].long()
        logprobs_A1 = scaled_AV.log_softmax(-1).gather(-1, sampled_A1)
        own_A = logprobs_A1.where(drawn_A1, 0.0)[:, 0]
    failed_A = async_tensor_h2d([row.failed for row in rows.values()], device, torch.bool)
    own_A = own_A.masked_fill(failed_A, -torch.inf)
    for columns_RK, value in ((ids_RK, OWN), (logprobs_RK, own_A)):
        columns_AK = columns_RK[places_A]
        columns_RK[places_A, 2:] = columns_AK[:, 1:-1]
        columns_RK[places_A, 1] = value
    return found._replace(logprob_token_ids=ids_RK, logprobs=logprobs_RK)
