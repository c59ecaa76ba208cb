"""The tensors of a running fetch, for an engine that loads them as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

from forge.core.named_tensor import NamedTensor
from forge.runtime.weights import HeldWeights
from services.inference.engines.arriving import Form
from services.inference.worker.weights.fetch import WeightFetch
from services.inference.worker.weights.relay import WeightRelay


class Arrival:
    """An `Arriving`."""

    def __init__(
        self, fetch: WeightFetch, run: asyncio.Task[HeldWeights], relay: WeightRelay
    ) -> None:
        self._fetch = fetch
        self._run = run
        self._relay = relay

    @classmethod
    async def begun(
        cls, fetch: WeightFetch, run: asyncio.Task[HeldWeights], relay: WeightRelay
    ) -> Arrival | None:
        """Wait for the manifest. None if the trainer sends none, or the fetch has ended before."""
        arrival = cls(fetch, run, relay)
        while not run.done() and not fetch.assembled:
            await arrival._news()
        return arrival if fetch.entries and not run.done() else None

    @property
    def forms(self) -> Mapping[str, Form]:
        """See `Arriving`."""
        manifest = self._fetch.manifest
        return {
            one.name: Form(
                dtype=one.dtype,
                shape=one.shape,
                size_bytes=one.size_bytes,
                hub=manifest.hub_parts(one) if manifest else (),
            )
            for one in self._fetch.entries
        }

    async def tensors(self) -> AsyncGenerator[NamedTensor]:
        """See `Arriving`."""
        for name, form in self.forms.items():
            while (tensor := self._fetch.arrived(name)) is None:
                if self._run.done():
                    self._run.result()
                await self._news()
            yield replace(tensor, hub=form.hub)

    async def whole(self) -> Mapping[str, NamedTensor]:
        """See `Arriving`."""
        await asyncio.wait({self._run})
        return {tensor.name: tensor for tensor in self._run.result().tensors}

    def keep(self) -> None:
        """See `Arriving`."""
        self._fetch.keep()

    async def _news(self) -> None:
        """Wait for data, or the end of the fetch."""
        changed = asyncio.ensure_future(self._relay.changed())
        try:
            await asyncio.wait({self._run, changed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
