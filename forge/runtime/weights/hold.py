"""A hold: workers serve versions that an operator chose, while the trainer publishes newer ones.

A rollback holds one version. A canary holds a newer one for some workers beside it. The value is in
etcd, written by the leading trainer alone; `promote` writes one without `base`.
"""

from __future__ import annotations

import msgspec

from forge.runtime.stored_json import decode_stored
from forge.runtime.weights.manifest import DEFAULT_POLICY, WeightAnnouncement

BROKEN_KEY = "broken_answers"
"""Metadata of a worker: version in service, and its answers that ended with a log-prob that is not
finite, as "VERSION COUNT"."""
ERROR_KEY = "weights_error"
"""Metadata of a worker after a failed fetch (version, sources and reasons) or a refused version."""


def hold_key(policy: str = DEFAULT_POLICY) -> str:
    """The etcd key of the hold of a policy."""
    return f"weights/{policy}/hold"


class WeightHold(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Stored in etcd as a JSON object of these fields."""

    base: WeightAnnouncement | None = None
    """Served by every worker but the canary's; None: workers follow the newest version."""
    canary: WeightAnnouncement | None = None
    canary_workers: tuple[str, ...] = ()
    """Instance ids of the workers that serve `canary`."""
    fence: int = 0
    """Fence of the leadership that wrote it."""
    subject: str = ""
    """Subject of the token that set it."""
    since_unix_s: float = 0.0
    automatic: bool = False
    """The trainer's own canary: it judges and replaces this hold, and no hold of a person."""
    rejected: int = 0
    """The newest version that an automatic canary rolled back."""

    @property
    def versions(self) -> tuple[int, ...]:
        """The held versions, the base first."""
        return tuple(one.weight_version for one in (self.base, self.canary) if one is not None)

    def wanted(
        self, instance_id: str, newest: WeightAnnouncement | None
    ) -> WeightAnnouncement | None:
        """The version that a worker is to serve; `newest` is the newest published one."""
        if self.base is None:
            return newest
        if self.canary is not None and instance_id in self.canary_workers:
            return self.canary
        return self.base

    def encode(self) -> bytes:
        """The value stored in etcd."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, value: bytes) -> WeightHold:
        """Raises `DataLoss` for a value that is not a hold."""
        return decode_stored(value, cls, "the hold of the weights")


NO_HOLD = WeightHold()
