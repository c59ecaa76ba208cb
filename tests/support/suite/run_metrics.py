"""What the services of a running `forge run` count, over their restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from forge.cli.connection import of_run
from forge.client.retry import retried
from tests.support.runtime.scraped import scraped
from tests.support.suite.forge_run import LIMIT_S, ForgeRun

KINDS = ("prefill", "decode", "router", "gateway")
_ACCEPTED = "forge_inference_accepted_drafts_total"
_REPEATED = ("forge_inference_requests_moved_total", "forge_gateway_upstream_retries_total")
_BLOCKS = "forge_inference_kv_store_blocks_total"
_FOUND = frozenset({"host", "disk"})
_DAMAGED = frozenset({"foreign", "truncated", "corrupt"})
_READ_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Counts of one process so far."""

    started_s: float
    """Unix time; tells a process from the one before."""
    accepted: float = 0.0
    """Drafts."""
    found: float = 0.0
    """Blocks read from the KV store."""
    damaged: float = 0.0
    """Blocks refused."""
    repeated: float = 0.0
    """Requests that a router placed, or a gateway sent, once more."""

    def since(self, earlier: Work | None) -> Work:
        """Work after an earlier look, or all of another process."""
        if earlier is None or earlier.started_s != self.started_s:
            return self
        return Work(
            started_s=self.started_s,
            accepted=self.accepted - earlier.accepted,
            found=self.found - earlier.found,
            damaged=self.damaged - earlier.damaged,
            repeated=self.repeated - earlier.repeated,
        )


async def work_of_services(run: ForgeRun) -> dict[str, Work]:
    """Return the work of gateway, router and workers that answer, by instance id."""
    # On a busy machine etcd may not answer a command in time.
    return await retried(lambda: _work_of_services(run), retry_for_s=LIMIT_S)


async def _work_of_services(run: ForgeRun) -> dict[str, Work]:
    found: dict[str, Work] = {}
    async with of_run(run.directory).open() as (coordinator, _):
        for kind in KINDS:
            for instance in await coordinator.discover(kind).wait(timeout_s=_READ_S):
                try:
                    text = await asyncio.to_thread(scraped, instance.metadata)
                except OSError:
                    continue  # killed; its lease is still there
                found[instance.instance_id] = _work(text)
    return found


def _work(text: str) -> Work:
    return Work(
        started_s=sum(_values(text, "process_start_time_seconds")),
        accepted=sum(_values(text, _ACCEPTED)),
        found=sum(_values(text, _BLOCKS, outcomes=_FOUND)),
        damaged=sum(_values(text, _BLOCKS, outcomes=_DAMAGED)),
        repeated=sum(_values(text, *_REPEATED)),
    )


def _values(text: str, *names: str, outcomes: frozenset[str] | None = None) -> Iterator[float]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names and (not outcomes or sample.labels["outcome"] in outcomes):
                yield sample.value
