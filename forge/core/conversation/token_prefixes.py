"""The token sequences of one growing trajectory, and the longest prefix that a new one shares.

Owns the storage rule of `Turn` in a live session: each turn has only its tail behind the prefix
shared with its parent. Ids are little-endian int32 bytes, compared and joined as memory, so the
cost of a turn depends on its new tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.core.token_columns import TOKEN_BYTES, common_tokens
from forge.core.trajectory import NO_PARENT


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """The first `tokens` tokens of the sequence of turn `turn`."""

    turn: int
    tokens: int


NOTHING_SHARED = SharedPrefix(turn=NO_PARENT, tokens=0)


@dataclass(slots=True, kw_only=True)
class _Entry:
    parent: int
    start: int
    """Tokens shared with the parent's sequence."""
    tail: bytes
    """Ids behind the shared prefix: the rest of the prompt, then the sampled ids."""
    prompt_tokens: int
    """Length of the whole prompt, the shared part included."""
    children: list[int] | None = None
    """None without children, as in most turns."""

    @property
    def tokens(self) -> int:
        return self.start + len(self.tail) // TOKEN_BYTES


class TokenPrefixes:
    """Sequences by turn index; append-only."""

    __slots__ = ("_entries", "_repeats", "_roots")

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._roots: list[int] = []
        self._repeats = False
        """Whether a prompt came twice; then sampled ids may repeat too."""

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, shared: SharedPrefix, prompt_tail: bytes, sampled: bytes) -> int:
        """Add a turn; return its index."""
        turn = len(self._entries)
        self._repeats = self._repeats or not prompt_tail
        if shared.turn == NO_PARENT:
            self._roots.append(turn)
        else:
            parent = self._entries[shared.turn]
            parent.children = [*(parent.children or ()), turn]
        self._entries.append(
            _Entry(
                parent=shared.turn,
                start=shared.tokens,
                tail=prompt_tail + sampled,
                prompt_tokens=shared.tokens + len(prompt_tail) // TOKEN_BYTES,
            )
        )
        return turn

    def append_nothing(self) -> int:
        """Add a turn without tokens, with which no sequence shares a prefix; return its index."""
        self._entries.append(_Entry(parent=NO_PARENT, start=0, tail=b"", prompt_tokens=0))
        return len(self._entries) - 1

    def prompt(self, turn: int) -> bytes:
        """Return the ids of a turn's prompt."""
        return self._join(turn, self._entries[turn].prompt_tokens)

    def sampled(self, turn: int) -> bytes:
        """Return a turn's sampled ids."""
        entry = self._entries[turn]
        return entry.tail[(entry.prompt_tokens - entry.start) * TOKEN_BYTES :]

    def sequence(self, turn: int) -> bytes:
        """Return a turn's prompt and sampled ids."""
        return self._join(turn, self._entries[turn].tokens)

    def whole(self, turn: int) -> SharedPrefix:
        """Return the whole sequence of a turn as a shared prefix."""
        return SharedPrefix(turn=turn, tokens=self._entries[turn].tokens)

    def whole_prompt(self, turn: int) -> SharedPrefix:
        """Return the whole prompt of a turn as a shared prefix."""
        return SharedPrefix(turn=turn, tokens=self._entries[turn].prompt_tokens)

    def longest(self, ids: bytes, *, known: SharedPrefix = NOTHING_SHARED) -> SharedPrefix:
        """Return the longest prefix that `ids` shares with a turn; of equals the earliest turn.

        `known` is a prefix that `ids` shares. Follows only turns that branch off where `ids` still
        agrees, and compares only their tails.
        """
        if self._repeats or not known.tokens:
            known, waiting = NOTHING_SHARED, list(reversed(self._roots))
        else:
            waiting = [self._first_with(known)]
        best = NOTHING_SHARED
        while waiting:
            turn = waiting.pop()
            entry = self._entries[turn]
            start = max(entry.start, known.tokens)
            tail = entry.tail[(start - entry.start) * TOKEN_BYTES :]
            alongside = ids[start * TOKEN_BYTES : start * TOKEN_BYTES + len(tail)]
            agreed = start + common_tokens(alongside, tail)
            if agreed > best.tokens:
                best = SharedPrefix(turn=turn, tokens=agreed)
            waiting.extend(
                child
                for child in reversed(entry.children or ())
                if known.tokens <= self._entries[child].start <= agreed
            )
        return best

    def _first_with(self, known: SharedPrefix) -> int:
        """Return the turn that added the last token of a prefix, if no prompt came twice.

        Then the tail of each turn begins with a token that no other turn has there. So only that
        turn has the whole prefix, and descendants that branch off at its end or later.
        """
        turn = known.turn
        while self._entries[turn].start >= known.tokens:
            turn = self._entries[turn].parent
        return turn

    def _join(self, turn: int, tokens: int) -> bytes:
        """Return the first `tokens` ids of the sequence of `turn`."""
        pieces: list[bytes] = []
        while tokens > 0:
            entry = self._entries[turn]
            own = (tokens - entry.start) * TOKEN_BYTES
            if own > 0:
                pieces.append(entry.tail[:own])
            tokens = min(tokens, entry.start)
            turn = entry.parent
        pieces.reverse()
        return b"".join(pieces)
