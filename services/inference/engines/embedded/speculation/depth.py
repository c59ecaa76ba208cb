"""Number of drafts: a choice per step, from measured acceptance and measured time. No clock.

With a_i the share of accepted drafts of head i among those whose drafts before were accepted, a
step with k drafts yields

    tokens(k) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k

for each sequence, and takes a time that depends on k and on the number of sequences, which share
the step: on few sequences a token more costs little, on many as much as a sequence more. The depth
with the most tokens per second is chosen; 0 if none pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from forge.core.errors import InvalidArgument

TRIALS = 3
"""Steps of each depth at a new number of sequences, before a choice."""
PROBE_STEPS = 64
"""One step in so many has another depth than the chosen one, to measure it again."""
LEAST_GAIN = 1.03
"""Least measured speed-up for which drafting stays on: measured times are not exact."""
_MEMORY_DRAFTS = 500.0
_NEW_SHARE = 0.15
"""Weight of a new time in the mean."""
_OUTLIER = 2.0
"""A step counts at most as so many times the mean: the processor had other work."""


class DepthChooser:
    """Chooses the number of drafts of each step."""

    def __init__(self, most: int, *, adaptive: bool = True) -> None:
        """Not adaptive: always as many as there are."""
        if most < 0:
            raise InvalidArgument(f"most = {most} drafts is not allowed")
        self._most = most
        self._adaptive = adaptive
        self._offered = [0.0] * most
        self._accepted = [0.0] * most
        self._times: dict[int, dict[int, tuple[int, float]]] = {}
        """Number of measurements and mean seconds, by load and depth."""
        self._steps = 0
        self._probe = 0

    def choose(self, sequences: int, *, most: int) -> int:
        """Return the number of drafts of the next step; at most `most`."""
        most = min(most, self._most)
        if not self._adaptive or most == 0:
            return most
        self._steps += 1
        times = self._times.get(_load(sequences), {})
        untried = [depth for depth in range(most + 1) if times.get(depth, (0, 0.0))[0] < TRIALS]
        if untried:
            return untried[0]
        if self._steps % PROBE_STEPS == 0:
            self._probe = (self._probe + 1) % (most + 1)
            return self._probe
        return self.best(sequences, most=most)

    def best(self, sequences: int, *, most: int) -> int:
        """Return the depth with the most tokens per second; 0 before all are measured. Not
        adaptive: as `choose`."""
        if not self._adaptive:
            return min(most, self._most)
        gains = [self.gain(sequences, depth) for depth in range(min(most, self._most) + 1)]
        found = max(range(len(gains)), key=gains.__getitem__)
        return found if gains[found] > LEAST_GAIN else 0

    def gain(self, sequences: int, depth: int) -> float:
        """Return tokens per second with so many drafts over those with none; 1 if unknown."""
        times = self._times.get(_load(sequences), {})
        if depth == 0 or 0 not in times or depth not in times:
            return 1.0
        return self.tokens(depth) * times[0][1] / times[depth][1]

    def tokens(self, depth: int) -> float:
        """Return the expected tokens of one sequence in a step."""
        shares = [
            (accepted + 1) / (offered + 2)
            for accepted, offered in zip(self._accepted, self._offered, strict=True)
        ]
        return 1.0 + sum(accumulate(shares[:depth], float.__mul__))

    def observe(
        self,
        *,
        sequences: int,
        depth: int,
        seconds: float,
        offered: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        """Record a step: its time, and by head the drafts that were verified behind accepted ones,
        and those that were accepted."""
        for head, (tried, taken) in enumerate(zip(offered, accepted, strict=True)):
            kept = max(0.0, 1.0 - tried / _MEMORY_DRAFTS)
            self._offered[head] = kept * self._offered[head] + tried
            self._accepted[head] = kept * self._accepted[head] + taken
        times = self._times.setdefault(_load(sequences), {})
        count, mean = times.get(depth, (0, seconds))
        if count < TRIALS:
            # The first step of a shape includes one-time work.
            mean = min(mean, seconds)
        else:
            mean += _NEW_SHARE * (min(seconds, _OUTLIER * mean) - mean)
        times[depth] = (count + 1, mean)


def _load(sequences: int) -> int:
    """Steps of similar size are measured together."""
    return sequences.bit_length()
