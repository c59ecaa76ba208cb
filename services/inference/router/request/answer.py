"""The answer of one request so far: its tokens, and what the next worker needs to continue it."""

from __future__ import annotations

from forge.core.token_columns import TOKEN_BYTES, float32_bytes, int32_array
from forge.runtime.rpc.routes import read_routes
from forge.runtime.rpc.tokens import joined, split
from forge.v1 import inference_pb2 as pb
from forge.v1.common_pb2 import SampledTokens, SamplingParams
from services.inference import codec
from services.inference.engines.base import Finish, Prompt
from services.inference.router.fleet.needs import Needs
from services.inference.router.fleet.workers import Engine
from services.inference.router.metrics import STARTED_OVER


class RoutedAnswer:
    """Tokens of one request, in order, from all workers that sampled some."""

    def __init__(self, request: pb.SampleRequest, prompt: Prompt, *, context_tokens: int) -> None:
        """`prompt`: the decoded request."""
        self._params = request.sampling
        self._prompt = prompt
        self._most_tokens = min(prompt.sampling.max_tokens, context_tokens - prompt.tokens)
        self._sampled = b""
        """All tokens, sent to the caller or not."""
        self._unsent: list[SampledTokens] = []
        self._engine: Engine | None = None
        """The engine of the last token."""
        self._engines: list[str] = []
        """Names of the engines that sampled, in order, none twice in a row."""
        self._refused_by: dict[Engine, str] = {}
        self._routes_to = 0
        """The first token of prompt and answer whose experts are not known."""
        self.is_sent = False
        """Whether the caller has a token."""
        self.version = 0
        """Newest version of the weights of the tokens."""
        self.finish: Finish | None = None
        self.cached_tokens: int | None = None
        """Tokens of the prompt that the first prefill found cached; None before its end."""

    @property
    def ids(self) -> bytes:
        """Prompt and tokens."""
        return self._prompt.ids + self._sampled

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self._sampled) // TOKEN_BYTES

    @property
    def engine(self) -> str:
        """Name of the engine that sampled the tokens, or all names joined by "+"."""
        return "+".join(self._engines)

    @property
    def needs(self) -> Needs:
        """Capabilities that the engine of the next worker must have."""
        sampling = self._prompt.sampling
        return Needs(
            sampling=sampling,
            seeded=self._params.HasField("seed") and sampling.temperature > 0,
            sampled_tokens=self.tokens,
            begun_on=self._engine,
            refused_by=dict(self._refused_by),
        )

    def rest(self) -> SamplingParams:
        """Return the parameters with which a worker continues behind the tokens so far."""
        return codec.sampling_of_rest(
            self._params,
            seed=self._prompt.sampling.seed,
            max_tokens=self._most_tokens - self.tokens,
            sampled_tokens=self.tokens,
            routes_to=self._routes_to,
        )

    def take(self, tokens: SampledTokens, engine: Engine) -> None:
        """Add tokens that a worker with this engine sampled."""
        # Here and not where a worker is chosen: that attempt may fail without a token.
        moved = self._engine is not None and engine != self._engine
        if moved and (change := self.needs.change_by(engine)):
            STARTED_OVER.labels(change).inc()
        self._sampled += tokens.ids
        self.version = max(self.version, *int32_array(tokens.weight_versions), 0)
        if span := read_routes(tokens.routed_experts):
            self._routes_to = span.end
        self._unsent.append(self._with_shares(tokens))
        self._engine = engine
        if self._engines[-1:] != [engine.name]:
            self._engines.append(engine.name)

    def _with_shares(self, tokens: SampledTokens) -> SampledTokens:
        """The tokens with their column of shares: a worker that continues behind `min_tokens` has
        nothing to leave out, and returns none."""
        if not self._prompt.sampling.reshapes or tokens.allowed_logprobs or not tokens.ids:
            return tokens
        filled = SampledTokens()
        filled.CopyFrom(tokens)
        filled.allowed_logprobs = float32_bytes([0.0] * (len(tokens.ids) // TOKEN_BYTES))
        return filled

    def end_if_complete(self) -> bool:
        """Set the finish if the last token ends the answer; return whether it does. The caller may
        have the token before its finish reason."""
        last = int32_array(self._sampled[-TOKEN_BYTES:])
        if self._prompt.sampling.stop_ids.intersection(last):
            self.finish = Finish.STOP
        elif self.tokens >= self._most_tokens:
            self.finish = Finish.LENGTH
        return self.finish is not None

    def refuse(self, engine: Engine, words: str) -> None:
        """Note that an engine cannot serve this request, though its capabilities do not say so."""
        self._refused_by[engine] = words

    def flush(self) -> list[SampledTokens]:
        """Return the tokens that the caller does not have yet, split into messages."""
        unsent, self._unsent = self._unsent, []
        self.is_sent = self.is_sent or bool(unsent)
        return list(split(joined(unsent)))

    def reset(self) -> None:
        """Drop all tokens; only while the caller has none."""
        assert not self.is_sent, "the caller has tokens"
        self._sampled, self._unsent, self._engine, self.version = b"", [], None, 0
        self._routes_to = 0
        self._engines.clear()
