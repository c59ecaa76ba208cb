"""The token sequences of one growing trajectory, and the longest prefix a new one shares.

Owns the storage rule of `Turn` while a session is live: each turn keeps only its own tail behind
the prefix it shares with its parent. Ids are little-endian int32 bytes throughout; they are
compared and joined as memory, so that a turn costs what is new in it and not what is old.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.core.trajectory import NO_PARENT, TOKEN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """The first `tokens` tokens of the sequence of turn `turn`."""

    turn: int
    tokens: int


NOTHING_SHARED = SharedPrefix(turn=NO_PARENT, tokens=0)


@dataclass(slots=True, kw_only=True)
class _Entry:
    shared: SharedPrefix
    tail: bytes
    """Ids behind the shared prefix: the rest of the prompt, then what was sampled."""
    prompt_tokens: int
    """Length of the whole prompt, the shared part included."""
    children: list[int]

    @property
    def tokens(self) -> int:
        return self.shared.tokens + len(self.tail) // TOKEN_BYTES


class TokenPrefixes:
    """Sequences by turn index; turns are only ever added."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._roots: list[int] = []

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, shared: SharedPrefix, prompt_tail: bytes, sampled: bytes) -> int:
        """Adds a turn and returns its index."""
        turn = len(self._entries)
        siblings = self._roots if shared.turn == NO_PARENT else self._entries[shared.turn].children
        siblings.append(turn)
        self._entries.append(
            _Entry(
                shared=shared,
                tail=prompt_tail + sampled,
                prompt_tokens=shared.tokens + len(prompt_tail) // TOKEN_BYTES,
                children=[],
            )
        )
        return turn

    def prompt(self, turn: int) -> bytes:
        """Ids the turn was sampled from."""
        return self._join(turn, self._entries[turn].prompt_tokens)

    def sampled(self, turn: int) -> bytes:
        """Ids the turn sampled."""
        entry = self._entries[turn]
        return entry.tail[(entry.prompt_tokens - entry.shared.tokens) * TOKEN_BYTES :]

    def sequence(self, turn: int) -> bytes:
        """Prompt and sampled ids."""
        return self._join(turn, self._entries[turn].tokens)

    def longest(self, ids: bytes) -> SharedPrefix:
        """The longest prefix that `ids` shares with any turn; among equals the earliest turn.

        Follows only turns that branch off where `ids` still agrees, and compares of each only
        its tail.
        """
        best = NOTHING_SHARED
        waiting = list(reversed(self._roots))
        while waiting:
            turn = waiting.pop()
            entry = self._entries[turn]
            start = entry.shared.tokens * TOKEN_BYTES
            alongside = ids[start : start + len(entry.tail)]
            agreed = entry.shared.tokens + common_tokens(alongside, entry.tail)
            if agreed > best.tokens:
                best = SharedPrefix(turn=turn, tokens=agreed)
            waiting.extend(
                child
                for child in reversed(entry.children)
                if self._entries[child].shared.tokens <= agreed
            )
        return best

    def _join(self, turn: int, tokens: int) -> bytes:
        """The first `tokens` ids of the sequence of `turn`."""
        pieces: list[bytes] = []
        while tokens > 0:
            entry = self._entries[turn]
            own = (tokens - entry.shared.tokens) * TOKEN_BYTES
            if own > 0:
                pieces.append(entry.tail[:own])
            tokens = min(tokens, entry.shared.tokens)
            turn = entry.shared.turn
        return b"".join(reversed(pieces))


def common_tokens(left: bytes, right: bytes) -> int:
    """How many leading ids two sequences share."""
    low, high = 0, min(len(left), len(right)) // TOKEN_BYTES
    # The usual cases first: everything agrees, or nothing does.
    if left[: high * TOKEN_BYTES] == right[: high * TOKEN_BYTES]:
        return high
    if left[:TOKEN_BYTES] != right[:TOKEN_BYTES]:
        return 0
    while low + 1 < high:
        middle = (low + high) // 2
        span = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)
        if left[span] == right[span]:
            low = middle
        else:
            high = middle
    return low
