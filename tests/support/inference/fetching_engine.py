"""An engine that only fetches keys and values."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from services.inference.engines.base import EngineStatus, FetchKv, KvSpan, ModelLimits, Piece
from services.inference.engines.capabilities import Capabilities


class FetchingEngine:
    """Fetches what the prompt's keys and values are, and samples nothing."""

    limits = ModelLimits(context_tokens=8, vocabulary=10)
    capabilities = Capabilities(
        engine="none", roles=frozenset({"decode"}), update="in_flight", draws="positional"
    )
    fetched: KvSpan | None = None
    version = 0

    def __init__(self, *, records: bool = False) -> None:
        self.capabilities = replace(self.capabilities, routed_experts=records)

    def status(self) -> EngineStatus:
        return EngineStatus(version=self.version, running=0)

    async def decode(
        self, prompt: Any, first: Any, fetch: FetchKv, *, stream: bool
    ) -> AsyncGenerator[Piece, None]:
        self.fetched = await fetch(0)
        return
        yield
