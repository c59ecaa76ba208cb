"""Quotas of domains in a batch.

Owns the quotas alone. `forge.core.queue.window.window` fills a quota that its domain cannot fill.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from forge.core.errors import InvalidArgument


class DomainShares:
    """Quotas by largest remainder (Hamilton's method), exact in the long run.

    Rounding errors are carried to the next batch, so each domain gets its share over many small
    batches.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        for domain, share in shares.items():
            if not (math.isfinite(share) and share > 0):
                raise InvalidArgument(f"domain share {domain} = {share!r} must be above 0")
        total = sum(shares.values())
        self.shares = {domain: share / total for domain, share in shares.items()}
        """Normalized to sum 1; empty if batches follow queue order alone."""
        self._carry = dict.fromkeys(shares, 0.0)
        self._known: dict[int, Mapping[str, int]] = {}
        """Cached quotas by batch size, because trainers ask many times for each batch."""

    def quotas(self, size: int) -> Mapping[str, int]:
        """Groups per domain, summing to `size`; empty without shares."""
        if size not in self._known:
            self._known = {size: self._rounded(size)}
        return self._known[size]

    def _rounded(self, size: int) -> dict[str, int]:
        ideal = self._ideal(size)
        quota = {domain: max(0, math.floor(wanted)) for domain, wanted in ideal.items()}
        by_remainder = sorted(ideal, key=lambda domain: quota[domain] - ideal[domain])
        while by_remainder and sum(quota.values()) < size:
            for domain in by_remainder[: size - sum(quota.values())]:
                quota[domain] += 1
        # A domain far ahead has quota 0 instead of a negative one; the domains that were rounded
        # up the most compensate for that.
        for domain in reversed(by_remainder):
            quota[domain] -= min(quota[domain], max(0, sum(quota.values()) - size))
        return quota

    def settle(self, size: int, quotas: Mapping[str, int]) -> None:
        """Carries the rounding errors of a chosen batch with these quotas."""
        self._known = {}
        self._carry = {
            domain: wanted - quotas[domain] for domain, wanted in self._ideal(size).items()
        }

    def _ideal(self, size: int) -> dict[str, float]:
        return {domain: size * share + self._carry[domain] for domain, share in self.shares.items()}
