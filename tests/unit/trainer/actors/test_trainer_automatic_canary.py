"""The automatic canary: a share of the workers serves each new version first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import structlog

from forge.rl.losses.stats import VersionGap
from forge.runtime.weights import BROKEN_KEY, ERROR_KEY, hold_key
from services.trainer.actors.steering import Promote, ResumeHold, ReviewCanary, RollBack
from services.trainer.setting_tables import CanarySettings
from tests.support.trainer.published_weights import FakeRegister
from tests.support.trainer.steering import WORKERS, SteeredTrainer

SETTINGS = CanarySettings(share=0.25, trajectories=4, max_logprob_gap=0.2, max_reward_drop=0.1)


def trainer_in(path: Path, register: FakeRegister | None = None, fence: int = 1) -> SteeredTrainer:
    return SteeredTrainer(register or FakeRegister(), path / "held", fence=fence, canary=SETTINGS)


def sampled(
    trainer: SteeredTrainer, version: int, *, reward: float = 0.5, gap: float = 0.01, count: int = 4
) -> None:
    """A batch of trajectories that a version sampled alone."""
    trainer.versions.qualities.add(
        {version: [reward] * count}, {version: VersionGap(tokens=100, gap_sum=100 * gap)}
    )


async def begun(trainer: SteeredTrainer) -> None:
    """Version 1 for all, 2 on a share of the workers."""
    await trainer.publish(1)
    assert await trainer.ask(ReviewCanary()) == "held"
    await trainer.publish(2)
    assert await trainer.ask(ReviewCanary()) == "begun"
    assert list(trainer.hold.versions) == [1, 2] and trainer.hold.canary_workers == ("d0",)


async def test_version_in_bounds_is_promoted_after_its_trajectories(tmp_path: Path) -> None:
    """Canary and base need enough of them; the newest version then begins the next canary."""
    trainer = trainer_in(tmp_path)
    await begun(trainer)
    await trainer.publish(3)
    sampled(trainer, 2)
    sampled(trainer, 1, count=3)
    assert await trainer.ask(ReviewCanary()) == ""
    sampled(trainer, 1, count=1)
    assert await trainer.ask(ReviewCanary()) == "promoted"
    assert list(trainer.hold.versions) == [2]
    assert trainer.files == ["version-00000002"]
    assert await trainer.ask(ReviewCanary()) == "begun"
    assert list(trainer.hold.versions) == [2, 3] and trainer.hold.subject == "automatic canary"


def _broken(trainer: SteeredTrainer) -> None:
    trainer.change_worker("d0", **{BROKEN_KEY: "2 1"})


def _refused(trainer: SteeredTrainer) -> None:
    trainer.change_worker("d0", **{ERROR_KEY: "version 2 is refused, version 1 stays: NaN"})


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (lambda trainer: sampled(trainer, 2, reward=0.3), "mean reward 0.3000, the base's 0.5000"),
        (lambda trainer: sampled(trainer, 2, gap=0.3), "log-prob gap 0.3000 above 0.2"),
        (_broken, "1 answers with a log-prob that is not finite"),
        (_refused, "refused: version 2 is refused"),
    ],
)
async def test_version_out_of_bounds_is_rolled_back(
    tmp_path: Path, fails: Callable[[SteeredTrainer], None], reason: str
) -> None:
    """Reward, log-prob gap, NaN, refusal: all serve the base, the trainer's log and the audit log
    have the reason, and the version is not tried again."""
    trainer = trainer_in(tmp_path)
    await begun(trainer)
    sampled(trainer, 1)
    fails(trainer)
    with structlog.testing.capture_logs() as logs:
        assert await trainer.ask(ReviewCanary()) == "rolled_back"
    (error,) = [line for line in logs if line["event"] == "canary_rolled_back"]
    assert error["weight_version"] == 2 and reason in error["reason"]
    assert list(trainer.hold.versions) == [1] and trainer.hold.rejected == 2
    assert await trainer.ask(ReviewCanary()) == ""
    await trainer.publish(3)
    assert await trainer.ask(ReviewCanary()) == "begun"
    assert list(trainer.hold.versions) == [1, 3]


async def test_canary_without_a_judgement_ends_by_its_time(tmp_path: Path) -> None:
    """For example while its worker samples nothing; the time is that of the hold in etcd, so a
    restart of the trainer does not begin it again."""
    trainer = trainer_in(tmp_path)
    await begun(trainer)
    assert await trainer.ask(ReviewCanary()) == ""
    early = trainer.hold.since_unix_s - SETTINGS.max_wait_s - 1
    aged = msgspec.structs.replace(trainer.hold, since_unix_s=early)
    stored = trainer.register.entries[hold_key()]
    await trainer.register.compare_and_swap(
        hold_key(), aged.encode(), expected_revision=stored.mod_revision
    )
    assert await trainer.ask(ReviewCanary()) == "rolled_back"
    assert list(trainer.hold.versions) == [1] and trainer.hold.rejected == 2


async def test_killed_trainer_continues_its_canary(tmp_path: Path) -> None:
    """The hold is in etcd and on disk; the judgement restarts with the next batches, and a
    rejected version stays rejected."""
    register = FakeRegister()
    await begun(trainer_in(tmp_path, register))
    restarted = trainer_in(tmp_path, register, fence=2)
    await restarted.ask(ResumeHold())
    assert await restarted.ask(ReviewCanary()) == ""
    await restarted.publish(3)
    sampled(restarted, 1)
    sampled(restarted, 2, reward=0.0)
    assert await restarted.ask(ReviewCanary()) == "rolled_back"
    again = trainer_in(tmp_path, register, fence=3)
    await again.ask(ResumeHold())
    await again.publish(4)
    assert again.hold.rejected == 2
    assert await again.ask(ReviewCanary()) == "begun"
    assert list(again.hold.versions) == [1, 4]


async def test_canary_without_its_workers_moves(tmp_path: Path) -> None:
    """To others that decode; with a single one left all follow the newest version."""
    trainer = trainer_in(tmp_path)
    await begun(trainer)
    trainer.workers = [one for one in WORKERS if one.instance_id != "d0"]
    assert await trainer.ask(ReviewCanary()) == "moved"
    assert list(trainer.hold.versions) == [1, 2] and trainer.hold.canary_workers == ("d1",)
    trainer.workers = [one for one in WORKERS if one.instance_id == "d3"]
    assert await trainer.ask(ReviewCanary()) == "ended"
    assert list(trainer.hold.versions) == []
    assert await trainer.ask(ReviewCanary()) == ""


async def test_hold_of_a_person_is_left_alone(tmp_path: Path) -> None:
    """Until its promotion, from which on the newest version is the base."""
    trainer = trainer_in(tmp_path)
    await begun(trainer)
    await trainer.ask(RollBack(version=1, subject="ann@host"))
    sampled(trainer, 2, reward=0.0)
    assert await trainer.ask(ReviewCanary()) == ""
    await trainer.ask(Promote(subject="ann@host"))
    assert await trainer.ask(ReviewCanary()) == "held"
    assert list(trainer.hold.versions) == [2]


async def test_canary_ends_with_the_run_or_its_setting(tmp_path: Path) -> None:
    """Nothing more is trained by which it could be judged; by default there is none at all."""
    trainer = trainer_in(tmp_path)
    await begun(trainer)
    assert await trainer.ask(ReviewCanary(finished=True)) == "ended"
    assert list(trainer.hold.versions) == []
    register = FakeRegister()
    await begun(trainer_in(tmp_path, register))
    off = SteeredTrainer(register, tmp_path / "held", fence=2)
    await off.publish(3)
    assert await off.ask(ReviewCanary()) == "ended"
    assert await off.ask(ReviewCanary()) == "" and list(off.hold.versions) == []
