"""What an operator lets the generation queue do."""

from __future__ import annotations

import enum


class Activity(enum.Enum):
    """Claims and batches that are out go on, whatever it is."""

    RUNNING = "running"
    PAUSED = "paused"
    """No rollout and no batch is handed out."""
    DRAINING = "draining"
    """No further group is started; what runs ends, and batches go out, the last one short."""
