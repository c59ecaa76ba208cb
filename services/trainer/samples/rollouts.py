"""The rollouts of a group: the rewards of each, and its trained turns.

Owns everything of a rollout that does not depend on other rollouts: its tokens, its returns, and
the choice of trained turns. No I/O, no tensors. `services.trainer.samples.group_facts` summarizes a
group, `services.trainer.samples.samples` a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forge.client.reward_events import reward_component
from forge.client.stored.trajectory_tree import turn_tokens
from forge.core.credit.overlong import masked_turns, overlong_penalties
from forge.core.credit.rewards import returns_to_go, turn_rewards
from forge.core.credit.side_calls import SideCall, side_calls
from forge.core.errors import InvalidArgument
from forge.core.sampling_limits import effective_temperature
from forge.core.token_columns import int32_array, outside
from forge.core.trajectory import TokenTree, TurnTokens
from forge.runtime.telemetry import log
from forge.v1 import common_pb2 as pb
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.grammar_correction import Cut, cut_of, logprobs_without_mask
from services.trainer.samples.other_models import policy_part, policy_turns
from services.trainer.samples.speed import completion_of, reported_speed

LeftOut = (
    Literal["empty", "aborted", "greedy", "overlong", "share_missing", "other_model"] | SideCall
)
"""Reason why a turn is not trained: it has no sampled token or no prompt; its agent left before the
end; it was sampled at temperature 0, so it has no distribution; a token limit cut it off, or
another turn of its trajectory; the share of allowed tokens is missing; another model than the
policy answered; it is a side call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """A consistent trajectory."""

    place: int
    """Among all trajectories of its group."""
    trajectory: pb.Trajectory
    turn_indices: Sequence[int]
    """In the pool, of each turn of `trajectory`."""
    tree: TokenTree
    returns: list[float]
    """Return-to-go of each turn, from outcome and process."""
    completion_s: float | None
    """None when unknown."""
    reported_speed: float | None
    """Speed that the task reported; None without one."""
    other_turns: int
    """Turns of other models, which `trajectory` lacks."""
    penalty: float
    """Sum of the penalties on the length of answers, which `returns` contain."""

    @property
    def sampled_tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(turn.sampled_tokens for turn in self.tree.turns)

    @property
    def version(self) -> int | None:
        """The weight version of all sampled tokens; None for several."""
        versions = [int32_array(turn.sampled.weight_versions) for turn in self.trajectory.turns]
        found = {bound for one in versions if one for bound in (min(one), max(one))}
        return found.pop() if len(found) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTurn:
    """Whether one turn is trained."""

    index: int
    """Among the turns of the rollout."""
    start: int
    """Tokens of its context; sampled tokens follow."""
    left_out: LeftOut | None
    """Reason why it is not trained; None: it is."""
    cut: Cut | None
    """Effect of cuts on it; None if another reason excludes it before."""


def read_rollouts(group: Sequence[pb.Trajectory], rules: CreditRules) -> list[ScoredTrajectory]:
    """The rollouts of a group's trajectories; inconsistent ones are left out and logged."""
    found = (_rollout(each, rules, place) for place, each in enumerate(group))
    return [one for one in found if one is not None]


def _rollout(trajectory: pb.Trajectory, rules: CreditRules, place: int) -> ScoredTrajectory | None:
    """None for an inconsistent trajectory, which must not stop the batch."""
    completion_s = completion_of(trajectory, tokens_per_s=rules.tokens_per_s)
    speed = reported_speed(trajectory)
    turn_indices = policy_turns(trajectory)
    trajectory, other_turns = policy_part(trajectory)
    try:
        _check_ids(trajectory, rules.vocabulary)
        tree = TokenTree([_trained_tokens(turn) for turn in trajectory.turns])
        rewards_T = turn_rewards(
            [reward_component(event) for event in trajectory.rewards],
            turns=len(trajectory.turns),
            weights=rules.weights,
        )
    except InvalidArgument as error:
        log.error("trajectory_excluded", trajectory_id=trajectory.trajectory_id, error=str(error))
        return None
    penalties_T = overlong_penalties([turn.sampled_tokens for turn in tree.turns], rules.overlong)
    rewards_T = [earned + penalty for earned, penalty in zip(rewards_T, penalties_T, strict=True)]
    return ScoredTrajectory(
        place=place,
        trajectory=trajectory,
        turn_indices=turn_indices,
        tree=tree,
        returns=returns_to_go(rewards_T, gamma=rules.weights.gamma),
        completion_s=completion_s,
        reported_speed=speed,
        other_turns=other_turns,
        penalty=sum(penalties_T),
    )


def _check_ids(trajectory: pb.Trajectory, vocabulary: int) -> None:
    """Raises `InvalidArgument` for an id that the policy does not have: its embedding would end the
    step of the whole batch."""
    for turn in trajectory.turns if vocabulary else ():
        for column in (turn.prompt_ids, turn.sampled.ids):
            if (wrong := outside(column, vocabulary)) is not None:
                engine = f" of engine {turn.engine}" if turn.engine else ""
                raise InvalidArgument(
                    f"turn {turn.turn_index}{engine} has token {wrong}; the vocabulary is 0 to "
                    f"{vocabulary - 1}"
                )


def _trained_tokens(turn: pb.Turn) -> TurnTokens:
    tokens = turn_tokens(turn)
    if cut_of(turn) == "share_missing":
        return tokens
    return replace(tokens, logprobs=logprobs_without_mask(turn.sampled))


def chosen_turns(rollout: ScoredTrajectory, rules: CreditRules) -> list[ChosenTurn]:
    """The choice of each turn, in order."""
    turns, lengths = rollout.trajectory.turns, rollout.tree.lengths
    contexts = [
        length - turn.sampled_tokens
        for length, turn in zip(lengths, rollout.tree.turns, strict=True)
    ]
    aside = side_calls(turns, contexts)
    if rollout.trajectory.domain in rules.train_side_calls:
        aside = {index: why for index, why in aside.items() if why == "excluded"}
    # A side call with a small limit says nothing about the answers of its trajectory.
    cut_off = [
        one.finish_reason == pb.FINISH_REASON_LENGTH and index not in aside
        for index, one in enumerate(turns)
    ]
    masked = masked_turns(cut_off, rules.overlong)
    return [
        _chosen(
            index,
            record,
            aside.get(index) or ("overlong" if masked[index] else None),
            start=contexts[index],
            length=lengths[index],
        )
        for index, record in enumerate(turns)
    ]


def _chosen(
    index: int, record: pb.Turn, reason: LeftOut | None, *, start: int, length: int
) -> ChosenTurn:
    """The choice of a turn, sampled from `start` to `length`; `reason` excludes it."""
    cut: Cut | None = None
    if start in (0, length):
        reason = "empty"
    # The agent did not receive the answer, so no reward depends on it.
    elif record.finish_reason == pb.FINISH_REASON_ABORTED:
        reason = "aborted"
    elif effective_temperature(record.temperature) <= 0:
        reason = "greedy"
    elif reason is None:
        cut = cut_of(record)
        if cut == "share_missing":
            reason = cut
    return ChosenTurn(index=index, start=start, left_out=reason, cut=cut)
