"""Messages of both actors of the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass

from services.inference.engines.embedded.model import StagedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Ask: serve these weights."""

    weights: StagedWeights
