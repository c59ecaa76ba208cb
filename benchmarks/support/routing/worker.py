"""One worker of the role both in virtual time: its passes, steps and prefix cache.

Passes and steps take what the embedded engine takes (`EngineCosts`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from benchmarks.support.routing.traffic import EngineCosts, Rollout
from forge.core.placement.prefix_cache import PrefixCache
from forge.core.token_columns import TOKEN_BYTES

BLOCK_TOKENS = 16
PASS_TOKENS = 512


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One turn on its way."""

    rollout: Rollout
    turn: int
    ids: bytes
    arrived_s: float = 0.0
    cached: int = 0
    left: int = 0
    compute_s: float = 0.0
    source: Request | None = None
    version: int = 0
    answered: int = 0
    """Tokens of the answer in `ids`: those of a worker that was lost."""
    sampled: int = 0
    began_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.ids) // TOKEN_BYTES

    @property
    def session(self) -> str:
        """The session."""
        return self.rollout.session

    @property
    def to_sample(self) -> int:
        """Tokens that are missing from the answer."""
        return self.rollout.turns[self.turn].answer_tokens - self.answered


@dataclass(slots=True)
class _Changes:
    """Listener of one cache."""

    stored_: list[bytes] = field(default_factory=list)
    removed_: list[bytes] = field(default_factory=list)
    anew: bool = False

    def stored(self, chains: list[bytes]) -> None:
        self.stored_ += chains

    def removed(self, chain: bytes) -> None:
        self.removed_.append(chain)

    def cleared(self) -> None:
        self.stored_, self.removed_, self.anew = [], [], True


class Worker:
    """The engine of one worker."""

    def __init__(self, costs: EngineCosts, cache_tokens: int, speed: float) -> None:
        self.changes = _Changes()
        self.cache = PrefixCache(
            block_tokens=BLOCK_TOKENS, capacity_tokens=cache_tokens, listener=self.changes
        )
        self.version = 1
        self.pending: deque[Request] = deque()
        self.running: list[Request] = []
        self.is_busy = False
        self.busy_s = 0.0
        self.is_lost = False
        self._costs = costs
        self._speed = speed

    def join(self, request: Request) -> None:
        """Take a request; what is cached, or computed for another one, it need not compute."""
        limit = request.tokens - 1
        request.cached = self.cache.match(request.ids, limit_tokens=limit).tokens
        shared, source = 0, None
        for other in self.pending:
            same = common_blocks(other.ids, request.ids, limit)
            if same > shared:
                shared, source = same, other
        if source is not None and shared > request.cached:
            request.cached, request.source = shared, source
        request.left = request.tokens - request.cached
        request.version = self.version
        self.pending.append(request)

    def plan(self) -> tuple[float, list[tuple[Request, int]]]:
        """Return the time of the next pass and step, and the tokens of the pass."""
        costs, spans = self._costs, list[tuple[Request, int]]()
        took_s, room = 0.0, PASS_TOKENS
        ready = [one for one in self.pending if one.source is None or one.source.left == 0]
        if ready:
            oldest, *others = ready
            others.sort(key=lambda one: one.left)
            for one in (oldest, *others):
                most = room if one is not oldest or not others else (room + 1) // 2
                tokens = min(one.left, most)
                if tokens:
                    spans.append((one, tokens))
                    room -= tokens
            took_s += costs.pass_s
            for one, tokens in spans:
                context = one.tokens - one.left + tokens / 2
                own_s = tokens * (costs.token_s + costs.context_s * context)
                pass_s = costs.pass_s * tokens / (PASS_TOKENS - room)
                one.compute_s += (own_s + pass_s) / self._speed
                took_s += own_s
        if self.running:
            kv = sum(one.tokens + one.sampled for one in self.running)
            took_s += costs.step_s + costs.row_s * len(self.running) + costs.kv_s * kv
        return took_s / self._speed, spans


def common_blocks(a: bytes, b: bytes, limit: int) -> int:
    """Return the leading tokens, at most `limit`, that two prompts share in whole blocks."""
    size = BLOCK_TOKENS * TOKEN_BYTES
    blocks = 0
    most = min(len(a), len(b), limit * TOKEN_BYTES) // size
    while (
        blocks < most
        and a[blocks * size : (blocks + 1) * size] == b[blocks * size : (blocks + 1) * size]
    ):
        blocks += 1
    return blocks * BLOCK_TOKENS
