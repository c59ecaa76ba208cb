"""Messages that both actors of the embedded engine take."""

from __future__ import annotations

from dataclasses import dataclass

from services.inference.engines.embedded.model import StagedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Ask: serve other weights."""

    weights: StagedWeights
