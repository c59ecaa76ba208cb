"""The rules of a canary: its workers, its judgement, and the next step of an automatic one. Pure.

An automatic canary holds the version that all workers serve, so that a newer one never reaches them
unjudged:

    held (base) -> begun (base and the newest) -> promoted (the newest is the base) | rolled_back
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from forge.core.errors import FailedPrecondition
from forge.runtime.coordination import Instance
from forge.runtime.weights import BROKEN_KEY, ERROR_KEY, WeightAnnouncement, WeightHold
from services.trainer.published.quality import Quality
from services.trainer.published.versions import PublishedVersions
from services.trainer.setting_tables import CanarySettings

SUBJECT = "automatic canary"
"""Subject of the holds that this trainer makes by itself."""


class CanaryVerdict(Enum):
    """Verdict of a judgement."""

    WAIT = "wait"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict and its reason."""

    outcome: CanaryVerdict
    reason: str = ""


def judge(
    settings: CanarySettings,
    *,
    canary: Quality,
    base: Quality,
    broken: int,
    refused: str,
    age_s: float,
) -> Judgement:
    """`broken`: answers of the canary's workers that ended with a log-prob that is not finite;
    `refused`: why a worker refused the version, or ""; `age_s`: time since the canary began."""
    if refused:
        return _roll_back(f"refused: {refused}")
    # Early: broken answers are no trajectories, so a canary of NaN alone would never have enough.
    allowed = settings.max_broken_share * max(settings.trajectories, canary.trajectories + broken)
    if broken > allowed:
        return _roll_back(
            f"{broken} answers with a log-prob that is not finite, allowed {allowed:g}",
        )
    # Without a trained token, as in flat groups that are dropped, there is no gap to judge.
    few = min(canary.trajectories, base.trajectories) < settings.trajectories
    if few or not canary.tokens:
        if not 0 < settings.max_wait_s < age_s:
            return Judgement(outcome=CanaryVerdict.WAIT)
        return _roll_back(
            f"no judgement within {settings.max_wait_s:g} s: the canary has "
            f"{canary.trajectories} trajectories and {canary.tokens} trained tokens, the base "
            f"{base.trajectories} trajectories, needed are {settings.trajectories}",
        )
    gap = canary.logprob_gap
    if not gap <= settings.max_logprob_gap:
        return _roll_back(f"log-prob gap {gap:.4f} above {settings.max_logprob_gap:g}")
    drop = base.mean_reward - canary.mean_reward
    if not drop <= settings.max_reward_drop:
        return _roll_back(
            f"mean reward {canary.mean_reward:.4f}, the base's {base.mean_reward:.4f}: "
            f"{drop:.4f} lower, allowed {settings.max_reward_drop:g}",
        )
    return Judgement(
        outcome=CanaryVerdict.PROMOTE, reason=f"{canary.trajectories} trajectories in bounds"
    )


def _roll_back(reason: str) -> Judgement:
    return Judgement(outcome=CanaryVerdict.ROLL_BACK, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldChange:
    """A change of the hold by the automatic canary."""

    hold: WeightHold
    outcome: str
    """held, begun, moved, promoted, rolled_back or ended."""
    reason: str = ""


def next_step(
    settings: CanarySettings,
    hold: WeightHold,
    versions: PublishedVersions,
    workers: Sequence[Instance],
    *,
    now_unix_s: float,
    finished: bool = False,
) -> HoldChange | None:
    """The next change; None if there is none now. A person's hold is left alone until its
    promotion. Without judgement by trained trajectories (the run is `finished`) or by other workers
    all follow the newest version."""
    if hold.base is not None and not hold.automatic:
        return None
    published = versions.published
    if not published:
        return None
    newest = published[-1].announcement
    ends = "the run has finished" if finished else "" if settings.share else "canary.share is 0"
    try:
        chosen = chosen_workers(workers, newest.weight_version, settings.share)
    except FailedPrecondition as error:
        ends, chosen = ends or str(error), ()
    if ends:
        over = WeightHold(subject=SUBJECT, rejected=hold.rejected)
        return (
            HoldChange(hold=over, outcome="ended", reason=ends) if hold.base is not None else None
        )
    if hold.base is None:
        return HoldChange(hold=_held(newest, rejected=hold.rejected), outcome="held")
    if hold.canary is not None:
        age_s = now_unix_s - hold.since_unix_s
        return _judged(settings, hold, versions, workers, chosen, age_s)
    if newest.weight_version <= max(hold.base.weight_version, hold.rejected):
        return None
    begun = msgspec.structs.replace(hold, canary=newest, canary_workers=chosen)
    return HoldChange(hold=begun, outcome="begun", reason=f"version {newest.weight_version}")


def _judged(
    settings: CanarySettings,
    hold: WeightHold,
    versions: PublishedVersions,
    workers: Sequence[Instance],
    chosen: tuple[str, ...],
    age_s: float,
) -> HoldChange | None:
    assert hold.base is not None and hold.canary is not None
    version = hold.canary.weight_version
    own = [one for one in workers if one.instance_id in hold.canary_workers]
    if not any(one.kind == "decode" for one in own):
        moved = msgspec.structs.replace(hold, canary_workers=chosen)
        return HoldChange(hold=moved, outcome="moved", reason="its workers have ended")
    found = judge(
        settings,
        canary=versions.qualities.of(version),
        base=versions.qualities.of(hold.base.weight_version),
        broken=sum(_broken(one, version) for one in own),
        refused=next((_refusal(one, version) for one in own if _refusal(one, version)), ""),
        age_s=age_s,
    )
    match found.outcome:
        case CanaryVerdict.PROMOTE:
            promoted = _held(hold.canary, rejected=hold.rejected)
            return HoldChange(hold=promoted, outcome="promoted", reason=found.reason)
        case CanaryVerdict.ROLL_BACK:
            back = _held(hold.base, rejected=version)
            return HoldChange(hold=back, outcome="rolled_back", reason=found.reason)
    return None


def _held(base: WeightAnnouncement, *, rejected: int) -> WeightHold:
    return WeightHold(base=base, subject=SUBJECT, automatic=True, rejected=rejected)


def _broken(worker: Instance, version: int) -> int:
    of, _, count = worker.metadata.get(BROKEN_KEY, "").partition(" ")
    return int(count) if of == str(version) and count.isdecimal() else 0


def _refusal(worker: Instance, version: int) -> str:
    error = worker.metadata.get(ERROR_KEY, "")
    return error if error.startswith(f"version {version} is refused") else ""


def chosen_workers(workers: Sequence[Instance], version: int, share: float) -> tuple[str, ...]:
    """The workers of a canary, by instance id: of those that decode at least one and not all, of
    prefill workers the same share if there are several. Workers that serve the version already
    come first. Raises `FailedPrecondition` for fewer than two that decode."""
    decode = [one for one in workers if one.kind == "decode"]
    prefill = [one for one in workers if one.kind == "prefill"]
    if len(decode) < 2:
        raise FailedPrecondition(
            f"{len(decode)} workers decode: a canary needs two, one of them for the other version"
        )

    def first(of: Sequence[Instance]) -> list[str]:
        number = min(len(of) - 1, max(1, math.floor(share * len(of) + 0.5))) if of else 0
        serving = str(version)
        ordered = sorted(
            of, key=lambda one: (one.metadata.get("weight_version") != serving, one.instance_id)
        )
        return [one.instance_id for one in ordered[:number]]

    return tuple(sorted({*first(decode), *first(prefill)}))
