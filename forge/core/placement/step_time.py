"""The time of a decode step as a line over the number of running requests, learned online."""

from __future__ import annotations

import math

_KNOWN = 4.0
_KEEP = math.exp(-1 / 200)
"""Weight that an observation keeps at the next one: after 200 it has lost 1 - 1/e."""
_UNKNOWN_SHARE = 0.25
"""Share of a step that counts as caused by its requests, until steps with few and many are seen."""
_LEAST_SHARE = 1 / 256
"""And at least: an idle worker is better than a busy one, if only a little."""


class StepTime:
    """`fixed_s + each_s * running`, by least squares over recent observations.

    Neither part is negative. Before the observations differ, most of the time counts as fixed.
    """

    def __init__(self, *, each_s: float) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._initial_s = each_s

    @property
    def is_known(self) -> bool:
        """Whether there are enough observations for a figure of its own."""
        return self._n >= _KNOWN

    def observe(self, *, running: float, seconds: float) -> None:
        """Observe the mean step of one request, beside `running` requests with itself."""
        keep = _KEEP
        self._n = self._n * keep + 1
        self._x = self._x * keep + running
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + running * running
        self._xy = self._xy * keep + running * seconds

    @property
    def each_s(self) -> float:
        """Seconds that one more request adds to a step."""
        if not self._n:
            return self._initial_s
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x**2
        proportional = mean_y / max(1.0, mean_x)
        if spread < 0.25 or not self.is_known:
            return proportional * _UNKNOWN_SHARE
        slope = (self._xy / self._n - mean_x * mean_y) / spread
        return min(max(slope, proportional * _LEAST_SHARE), proportional)
