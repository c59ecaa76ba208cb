"""The published versions that this trainer can send: the newest ones, and those of a hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from forge.core.errors import NotFound
from forge.runtime.weights import NO_HOLD, HeldWeights, WeightAnnouncement, WeightHold
from services.trainer.metrics import VersionRole
from services.trainer.published.quality import Qualities, Quality
from services.trainer.published.segments import OtherRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """A version that was announced."""

    announcement: WeightAnnouncement
    published_unix_s: float
    on_disk: bool = False
    """The data is in a file, which survives the process."""

    @property
    def weight_version(self) -> int:
        """The version's number."""
        return self.announcement.weight_version


class PublishedVersions:
    """Data and announcements of versions, with the hold that they serve."""

    def __init__(self, *, kept: int) -> None:
        """`kept`: newest versions in memory."""
        self._kept = kept
        self._weights: dict[int, HeldWeights] = {}
        self._published: dict[int, PublishedVersion] = {}
        self._pinned: frozenset[int] = frozenset()
        self.hold: WeightHold = NO_HOLD
        """The hold in etcd, as this trainer knows it."""
        self.qualities = Qualities()
        """Qualities of all versions, held or not."""
        self.others: OtherRanks | None = None
        """The ranks that hold the other segments of versions; None: versions are here whole."""

    @property
    def weights(self) -> Mapping[int, HeldWeights]:
        """Data by version, announced or about to be."""
        return self._weights

    @property
    def published(self) -> list[PublishedVersion]:
        """The announced versions, the oldest first."""
        return [self._published[version] for version in sorted(self._published)]

    def quality_of(self, role: VersionRole) -> Quality:
        """The quality of a held version; zero without one."""
        held = self.hold.base if role == "base" else self.hold.canary
        return self.qualities.of(held.weight_version) if held is not None else Quality()

    def version(self, version: int) -> PublishedVersion:
        """An announced version. Raises `NotFound`."""
        found = self._published.get(version)
        if found is None:
            held = sorted(self._published) or "none"
            raise NotFound(
                f"weight version {version} is not held; held: {held}. The setting kept_versions "
                "is the number of published versions that are kept"
            )
        return found

    @property
    def divided(self) -> list[int]:
        """The versions whose segments lie on several ranks."""
        return [number for number, one in self._weights.items() if one.segment is not None]

    def join(self, others: OtherRanks) -> None:
        """Add versions together with these ranks from now on. Those of ranks that have ended go:
        their segments are lost."""
        if others is self.others:
            return
        for version in self.divided:
            self._drop(version)
        self.others = others

    def add(self, version: int, weights: HeldWeights) -> None:
        """Hold a version that will be announced."""
        self._weights[version] = weights

    def withdraw(self, version: int) -> None:
        """Drop a version that was not announced."""
        self._weights.pop(version, None)

    def announced(self, one: PublishedVersion) -> None:
        """Records an announced version; drops the oldest beyond the limit."""
        self._published[one.weight_version] = one
        self._prune()

    def store(self, one: PublishedVersion, weights: HeldWeights) -> None:
        """Replace a version's data by that of its file, or add it."""
        self._weights[one.weight_version] = weights
        self._published[one.weight_version] = one

    def pin(self, versions: Collection[int]) -> None:
        """Keep these versions always, and others up to the limit."""
        self._pinned = frozenset(versions)
        self._prune()

    def _prune(self) -> None:
        newest = sorted(self._weights.keys() - self._pinned)[-self._kept :]
        for version in self._weights.keys() - self._pinned - set(newest):
            self._drop(version)

    def _drop(self, version: int) -> None:
        del self._weights[version]
        self._published.pop(version, None)
