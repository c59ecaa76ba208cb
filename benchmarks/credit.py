"""Variance of the policy gradient under ways to credit turns: `python -m benchmarks.credit`.

    [--quick] [--json FILE] [--turns 50]

A world whose gradient is known: T turns, in each a softmax over four actions of its own. The
outcome is 1 with probability `1/2 + 1/T sum_t u[t, a_t]`, u within 1/2; a process reward of a turn,
where there are any, is `u[t, a_t]` and Gaussian noise. So the expected reward is linear in what
every turn does, and the expected gradient of every way of crediting can be written down. Rewards,
returns and advantages are computed by `forge.core`, in groups of eight rollouts.

    trace    of the covariance of one trajectory's gradient `sum_t A_t grad log pi(a_t)`
    samples  the same over the squared length of the expected gradient: how many trajectories the
             same relative noise takes
    cosine   between expected and true gradient: below 1, no number of samples makes up for it

Trace and samples are relative to `whole`: each turn credited with the whole return less the mean
of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.support.report import arguments, keep
from forge.core.credit.advantages import AdvantageRules, Baseline, GroupReturns, batch_advantages
from forge.core.credit.rewards import RewardComponent, RewardWeights, returns_to_go, turn_rewards

ACTIONS = 4
GROUP = 8
KEYS = ("trace", "samples", "cosine")
ALPHA = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Values of actions, the policy, and the noise of process rewards."""

    worth_TA: np.ndarray
    probs_TA: np.ndarray
    process: bool
    noise: float

    def gradient(self, gamma: float = 1.0) -> np.ndarray:
        """[T, A], exact, of the expected return-to-go in the policy's logits: a turn changes its
        own process reward, and the outcome, which is earned at the last turn."""
        turns = len(self.worth_TA)
        discount_T = gamma ** np.arange(turns - 1, -1, -1)
        share_T = discount_T / turns + (ALPHA if self.process else 0.0)
        gain_TA = self.worth_TA * share_T[:, None]
        mean_T1 = (self.probs_TA * gain_TA).sum(1, keepdims=True)
        exact: np.ndarray = self.probs_TA * (gain_TA - mean_T1)
        return exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Actions [N, T] and rewards per turn of each."""

    actions_NT: np.ndarray
    rewards: Sequence[Sequence[float]]


Credit = Callable[[Sequence[Sequence[float]]], list[list[float]]]
"""Rewards of all rollouts, group after group, to advantages."""


def make_world(turns: int, *, process: bool, noise: float) -> World:
    rng = np.random.default_rng(0)
    logits_TA = rng.normal(size=(turns, ACTIONS))
    probs_TA = np.exp(logits_TA)
    return World(
        worth_TA=rng.uniform(-0.5, 0.5, (turns, ACTIONS)),
        probs_TA=probs_TA / probs_TA.sum(1, keepdims=True),
        process=process,
        noise=noise,
    )


def roll_out(world: World, count: int) -> Rollouts:
    rng = np.random.default_rng(1)
    turns = len(world.worth_TA)
    draws_NT1 = rng.random((count, turns, 1))
    actions_NT = (draws_NT1 > world.probs_TA.cumsum(1)[None, :, :-1]).sum(2)
    worth_NT = world.worth_TA[np.arange(turns), actions_NT]
    outcome_N = rng.random(count) < 0.5 + worth_NT.mean(1)
    process_NT = worth_NT + world.noise * rng.normal(size=worth_NT.shape)
    weights = RewardWeights(alpha=ALPHA)
    rewards = []
    for outcome, process_T in zip(outcome_N, process_NT, strict=True):
        components = [RewardComponent(kind="outcome", value=float(outcome), turn_index=-1)]
        if world.process:
            components += [
                RewardComponent(kind="process", value=float(value), turn_index=turn)
                for turn, value in enumerate(process_T)
            ]
        rewards.append(turn_rewards(components, turns=turns, weights=weights))
    return Rollouts(actions_NT=actions_NT, rewards=rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Way of crediting turns."""

    credit: Credit
    gamma: float = 1.0
    own_share: float = 0.0
    """Share of the rollout itself in its baseline, which takes that much of the gradient away."""

    def expected(self, world: World) -> np.ndarray:
        """[T, A] mean gradient: turn t is in its return-to-go, and by gamma^t in the baseline."""
        turns = np.arange(len(world.worth_TA))
        kept_T = 1 - self.own_share * self.gamma**turns
        mean: np.ndarray = world.gradient(self.gamma) * kept_T[:, None]
        return mean


def to_go(*, gamma: float = 1.0, baseline: Baseline = "group_mean") -> Way:
    """Forge's: the return from the turn on, less the group's baseline."""

    def credit(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
        returns = [returns_to_go(rewards_T, gamma=gamma) for rewards_T in rewards]
        return _advantages(returns, baseline)

    own_share = 1 / GROUP if baseline == "group_mean" else 0.0
    return Way(credit=credit, gamma=gamma, own_share=own_share)


def whole(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """The whole return at every turn."""
    return _advantages([[sum(rewards_T)] * len(rewards_T) for rewards_T in rewards], "group_mean")


def per_turn(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """The return from the turn on, less its mean over the others at the same turn; not offered."""
    returns_GIT = np.asarray(
        [returns_to_go(rewards_T, gamma=1.0) for rewards_T in rewards]
    ).reshape(-1, GROUP, len(rewards[0]))
    others_GIT = (returns_GIT.sum(1, keepdims=True) - returns_GIT) / (GROUP - 1)
    advantages: list[list[float]] = (returns_GIT - others_GIT).reshape(len(rewards), -1).tolist()
    return advantages


def _advantages(returns: Sequence[Sequence[float]], baseline: Baseline) -> list[list[float]]:
    groups = [
        GroupReturns(returns=returns[start : start + GROUP])
        for start in range(0, len(returns), GROUP)
    ]
    done = batch_advantages(groups, AdvantageRules(baseline=baseline))
    return [advantages_T for group in done for advantages_T in group.advantages]


def trace_of(world: World, rollouts: Rollouts, credit: Credit) -> float:
    """Trace of the covariance of one trajectory's gradient."""
    advantages_NT = np.asarray(credit(rollouts.rewards))
    scores_NTA = np.eye(ACTIONS)[rollouts.actions_NT] - world.probs_TA
    return float((advantages_NT[:, :, None] * scores_NTA).var(0).sum())


WAYS = {
    "whole": Way(credit=whole, own_share=1 / GROUP),
    "to_go": to_go(),
    "to_go_loo": to_go(baseline="leave_one_out"),
    "to_go_none": to_go(baseline="none"),
    "to_go_g99": to_go(gamma=0.99),
    "to_go_g95": to_go(gamma=0.95),
    "per_turn": Way(credit=per_turn),
}


def measure(world: World, rollouts: Rollouts) -> dict[str, float]:
    """The keys of one world."""
    true_TA = world.gradient()
    found: dict[str, float] = {}
    for name, way in WAYS.items():
        expected_TA = way.expected(world)
        trace = trace_of(world, rollouts, way.credit)
        length = float(np.linalg.norm(expected_TA))
        found[f"{name}.trace"] = trace
        found[f"{name}.samples"] = trace / length**2
        found[f"{name}.cosine"] = float(
            (expected_TA * true_TA).sum() / length / np.linalg.norm(true_TA)
        )
    for key in ("trace", "samples"):
        whole_value = found[f"whole.{key}"]
        for name in WAYS:
            found[f"{name}.{key}"] /= whole_value
    return found


def main() -> None:
    parser = arguments(__doc__, quick="2,048 trajectories instead of 32,768")
    parser.add_argument("--turns", type=int, default=50)
    options = parser.parse_args()
    numbers: dict[str, float] = {}
    print("trace, samples, cosine".ljust(24) + "".join(f"{name:>22}" for name in WAYS))
    for name, process, noise in (
        ("outcome", False, 0.0),
        ("process_s0", True, 0.0),
        ("process_s1", True, 1.0),
        ("process_s3", True, 3.0),
    ):
        world = make_world(options.turns, process=process, noise=noise)
        found = measure(world, roll_out(world, 2048 if options.quick else 32768))
        numbers |= {f"{name}.{key}": value for key, value in found.items()}
        shown = (
            "{:.2f} {:.2f} {:.3f}".format(*(found[f"{way}.{key}"] for key in KEYS)) for way in WAYS
        )
        print(f"{name:<24}" + "".join(f"{one:>22}" for one in shown))
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
