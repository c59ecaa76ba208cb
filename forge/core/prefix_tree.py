"""Plans prefix trees: finds the computations that samples of a batch share.

Owns the compressed radix trie over token ids, its depth-first layout and the partition of a batch
into trees within a token budget. Not here: the execution of a plan (`forge.rl`).

A token's hidden state depends only on the tokens before it, so samples with a common prefix share
the states of that prefix. A plan has every distinct prefix once, in depth-first order:

    samples  a b c d      layout    a b c d x y e      position 0 1 2 3 2 3 1
             a b x y      nodes     [a) [b) [c d) [x y) [e)
             a e          a token's ancestors are its prefix; a node's descendants are contiguous

A tree beyond the budget is cut in one of two ways, whichever computes less (`_partition`):

    recompute  its samples go into several trees, and each tree computes the shared prefix
    relay      one tree in several passes over consecutive parts of the layout, in which later
               parts attend the keys and values of earlier ones: computed once, forward twice

Ids are int32 little-endian bytes throughout, as they travel: sorting and comparing are memcmp,
and nothing is done per token in Python. Cost is O(total bytes) plus O(log) per sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from operator import sub
from typing import NamedTuple

from forge.core.errors import InvalidArgument
from forge.core.routes import RouteSpan
from forge.core.token_columns import TOKEN_BYTES, common_tokens

Span = tuple[int, int]
"""A half-open range of token indices."""

STEP_COST = 3.0
"""Forward and backward, in forwards."""
RELAY_COST = 1.0
"""Additional cost of a relayed token: its forward runs again in the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trainable sequence: a context and its sampled tokens.

    The three columns have one entry per trained token, in the order of the sequence.
    """

    ids: bytes
    """int32: the whole sequence."""
    trained: tuple[Span, ...]
    """Ranges of the tokens with loss: ascending, disjoint, from index 1 on."""
    behavior_logprobs: bytes
    """float32: log-prob in the sampled distribution."""
    weight_versions: bytes
    """int32: weight version of each sampled token."""
    advantages: bytes
    """float32."""
    temperature: float = 1.0
    """Temperature of sampling."""
    returns: bytes = b""
    """float32: return-to-go of the turn, for a critic; empty without one. With a critic,
    `advantages` are weights on the critic's estimates."""
    shares: bytes = b""
    """float32: factor pi_old / mu, at most 1, on advantages of tokens drawn from another
    distribution mu than the policy's; `advantages` contain it. Empty: 1."""
    domain: str = ""
    engine: str = ""
    """Engine that sampled it, for statistics."""
    trajectory: int = -1
    """Number of its trajectory in the batch; -1: this sample is a trajectory of its own."""
    group: int = -1
    """Number of its group in the batch; -1: this sample is a group of its own."""
    number: int = -1
    """The sample's number in the batch, by which a step returns values of the tokens; -1: it
    returns none."""
    routes: tuple[RouteSpan, ...] = ()
    """Experts of its tokens, as recorded: ascending, disjoint. The model chooses those of tokens
    in no span."""

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return len(self.ids) // TOKEN_BYTES

    @property
    def trained_tokens(self) -> int:
        """Number of tokens with loss."""
        return sum(end - start for start, end in self.trained)

    def validate(self) -> None:
        """Raises `InvalidArgument` when the columns do not fit the sequence."""
        if len(self.ids) % TOKEN_BYTES or not self.ids:
            raise InvalidArgument(
                f"ids has {len(self.ids)} bytes; must be a positive multiple of 4"
            )
        previous = 1
        for start, end in self.trained:
            if not previous <= start < end <= self.tokens:
                raise InvalidArgument(
                    f"trained range [{start}, {end}) in a sequence of {self.tokens} tokens; ranges "
                    "must ascend, not overlap, and leave the first token out"
                )
            previous = end
        expected = self.trained_tokens * TOKEN_BYTES
        for name in ("behavior_logprobs", "weight_versions", "advantages"):
            if len(getattr(self, name)) != expected:
                raise InvalidArgument(
                    f"{name} has {len(getattr(self, name))} bytes; {expected} expected"
                )
        for name in ("returns", "shares"):
            if len(getattr(self, name)) not in (0, expected):
                raise InvalidArgument(
                    f"{name} has {len(getattr(self, name))} bytes; 0 or {expected} expected"
                )
        previous = 0
        for span in self.routes:
            if not previous <= span.start < span.end <= self.tokens:
                raise InvalidArgument(
                    f"routes of the tokens [{span.start}, {span.end}) in a sequence of "
                    f"{self.tokens} tokens; spans must ascend and not overlap"
                )
            previous = span.end
        if not self.temperature > 0:
            raise InvalidArgument(
                f"temperature is {self.temperature}; must be > 0 to be trained on"
            )


_Cost = tuple[float, int]
"""Work in forwards of one token, then the number of trees."""


class Node(NamedTuple):
    """A chain of tokens without a branch, in the depth-first layout."""

    start: int
    end: int
    subtree_end: int
    """The node's descendants are `[end, subtree_end)`."""
    depth: int
    """Position in the sequence of the first token."""
    parent: int
    """Layout index of the token before the first one; -1 at a root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePlan:
    """The merged layout of samples of a batch; one forward pass, or several if relayed."""

    ids: bytes
    """int32: the distinct tokens, depth first."""
    nodes: tuple[Node, ...]
    """In layout order; they tile the layout."""
    samples: tuple[int, ...]
    """Indices of the batch's samples in this tree."""
    trained: tuple[tuple[Span, ...], ...]
    """Per sample, the layout ranges of its trained tokens, in the order of the sequence."""
    lasts: tuple[int, ...]
    """Per sample, the place of its last token in the layout."""
    parts: tuple[Span, ...]
    """Layout ranges of at most the budget each, one pass per part; they tile the layout."""
    keys: bytes = b""
    """int32: the token with its route, as numbered by `forge.rl.tree.routes`; empty without."""

    @property
    def tokens(self) -> int:
        """Number of tokens to compute."""
        return len(self.ids) // TOKEN_BYTES

    def work(self, pair_cost: float) -> float:
        """Tokens to compute, each weighted by the tokens it attends."""

        def until(depth: int) -> float:
            return depth + pair_cost * depth * (depth + 1) / 2

        return sum(until(one.depth + one.end - one.start) - until(one.depth) for one in self.nodes)


def plan_trees(
    samples: Sequence[Sample],
    *,
    token_budget: int,
    pair_cost: float = 0.0,
    relay: bool = True,
    keys: Sequence[bytes] = (),
) -> list[TreePlan]:
    """Merge samples into trees at the least cost, in passes of at most `token_budget` tokens.

    Every sample is in exactly one tree, so losses and gradients of trees add up without correction;
    a prefix shared by two trees is computed in both. `pair_cost` is the cost of one query-key pair,
    relative to a token's cost without attention. Without `relay` each tree is one pass, and a
    sample above the budget is a tree that exceeds it. `keys` replace the ids of each sample: tokens
    are shared where these are equal, and plans have them as ids.
    """
    columns = keys or [one.ids for one in samples]
    order = sorted(range(len(samples)), key=columns.__getitem__)
    shared = [0] * len(order)
    for rank in range(1, len(order)):
        shared[rank] = common_tokens(columns[order[rank - 1]], columns[order[rank]])
    lengths = [samples[index].tokens for index in order]
    budget = token_budget if relay else None
    return [
        _merge(samples, columns, order[start:end], shared[start:end], budget)
        for start, end in _partition(lengths, shared, token_budget, pair_cost, relay=relay)
    ]


def _partition(
    lengths: Sequence[int], shared: Sequence[int], budget: int, pair_cost: float, *, relay: bool
) -> list[Span]:
    """Cut sorted samples into consecutive runs, each one tree, at the least total cost.

    Dynamic program over the last cut. With `new[n]` the tokens that the first n samples add to
    one endless tree, the run [start, end) holds `new[end] - new[start] + shared[start]` tokens;
    its work is the same difference over tokens weighed by the number they attend. A run within the
    budget costs three times its work. Beyond, where it is relayed, it costs four times less the
    last part, whose forward is not run again. Starts within the budget are a window that slides
    with the end and those before it only grow in number: two running minima, so O(samples).
    """
    work = [length + pair_cost * length * (length + 1) / 2 for length in lengths]
    again = [common + pair_cost * common * (common + 1) / 2 for common in shared]
    new = list(accumulate(map(sub, lengths, shared), initial=0))
    spent = list(accumulate(map(sub, work, again), initial=0.0))
    best: list[_Cost] = [(0.0, 0)]
    cuts = [0]

    def entered(start: int, rate: float) -> tuple[_Cost, int]:
        cost, trees = best[start]
        return (cost - rate * (spent[start] - again[start]), trees + 1), start

    window: deque[tuple[_Cost, int]] = deque()  # starts within the budget, by rising cost
    beyond: tuple[_Cost, int] = ((inf, 0), 0)  # the cheapest start of a relayed run
    first = 0
    twice = STEP_COST + RELAY_COST
    for end in range(1, len(new)):
        newest = entered(end - 1, STEP_COST)
        while window and window[-1] >= newest:
            window.pop()
        window.append(newest)
        while first < end and new[end] - new[first] + shared[first] > budget:
            beyond = min(beyond, entered(first, twice))
            first += 1
        while window and window[0][1] < first:
            window.popleft()
        (cost, trees), cut = beyond
        choice = (cost + twice * spent[end] - RELAY_COST * budget, trees), cut
        if not relay:  # only what cannot be cut at all
            (cost, trees), cut = newest
            choice = (cost + STEP_COST * spent[end], trees), cut
        if window:
            (cost, trees), cut = window[0]
            choice = min(choice, ((cost + STEP_COST * spent[end], trees), cut))
        best.append(choice[0])
        cuts.append(choice[1])
    return _runs(cuts)


def _runs(cuts: Sequence[int]) -> list[Span]:
    """The runs of all samples; `cuts[end]` is the start of the best last run before `end`."""
    runs: list[Span] = []
    end = len(cuts) - 1
    while end:
        runs.append((cuts[end], end))
        end = cuts[end]
    return runs[::-1]


def _merge(
    samples: Sequence[Sample],
    columns: Sequence[bytes],
    order: Sequence[int],
    shared: Sequence[int],
    budget: int | None,
) -> TreePlan:
    trie = _Trie()
    trained: list[tuple[Span, ...]] = []
    lasts: list[int] = []
    for rank, index in enumerate(order):
        one = samples[index]
        trie.insert(columns[index], shared[rank] if rank else 0)
        trained.append(tuple(trie.locate(one.trained)))
        lasts.extend(start for start, _ in trie.locate([(one.tokens - 1, one.tokens)]))
    tokens = sum(map(len, trie.pieces)) // TOKEN_BYTES
    return TreePlan(
        ids=b"".join(trie.pieces),
        nodes=trie.nodes(),
        samples=tuple(order),
        trained=tuple(trained),
        lasts=tuple(lasts),
        parts=tuple(_parts(tokens, budget or tokens)),
    )


def _parts(tokens: int, budget: int) -> Iterator[Span]:
    """Ranges of at most the budget; the last one, whose forward is run once, is full."""
    cuts = range(tokens % budget or min(budget, tokens), tokens + 1, budget)
    yield from pairwise([0, *cuts])


class _Trie:
    """Radix trie over sorted sequences, kept as the path of the newest one.

    Layout indices never move: a split only cuts a chain in two, so a sequence can be located
    as soon as it is inserted.
    """

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self._size = 0
        self._path: list[list[int]] = []  # [start, end, depth, parent] of each open node
        self._closed: list[Node] = []

    def insert(self, ids: bytes, shared: int) -> None:
        """Add a sequence; its first `shared` tokens are those of the previous one."""
        self._close(shared)
        tokens = len(ids) // TOKEN_BYTES
        if shared == tokens:
            return
        grown = self._size + tokens - shared
        if self._path and self._path[-1][1] == self._size:
            self._path[-1][1] = grown  # the previous sequence went on: no branch, same chain
        else:
            parent = self._path[-1][1] - 1 if self._path else -1
            self._path.append([self._size, grown, shared, parent])
        self.pieces.append(ids[shared * TOKEN_BYTES :])
        self._size = grown

    def locate(self, spans: Sequence[Span]) -> Iterator[Span]:
        """Yield the layout ranges of ranges of the last inserted sequence."""
        for start, end in spans:
            for node_start, node_end, depth, _ in self._path:
                low = max(start, depth)
                high = min(end, depth + node_end - node_start)
                if low < high:
                    yield node_start + low - depth, node_start + high - depth

    def nodes(self) -> tuple[Node, ...]:
        """Close the trie; return all nodes in layout order."""
        self._close(0)
        return tuple(sorted(self._closed))

    def _close(self, depth_kept: int) -> None:
        while self._path and self._path[-1][2] >= depth_kept:
            start, end, depth, parent = self._path.pop()
            self._closed.append(Node(start, end, self._size, depth, parent))
        if not self._path:
            return
        top = self._path[-1]
        start, end, depth, _ = top
        middle = start + depth_kept - depth
        if middle < end:
            self._closed.append(Node(middle, end, self._size, depth_kept, middle - 1))
            top[1] = middle
