"""The activity of the generation queue, which an operator sets."""

from __future__ import annotations

import enum


class Activity(enum.Enum):
    """Leased rollouts and batches stay valid in each of them."""

    RUNNING = "running"
    PAUSED = "paused"
    """No rollout and no batch is leased."""
    DRAINING = "draining"
    """No group is started; running groups end, and batches are leased, the last one short."""
