"""Turns of other models than the policy: no samples, and no effect on those of the policy."""

from __future__ import annotations

from forge.core.credit.rewards import RewardWeights
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.v1 import common_pb2 as pb
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.other_models import policy_part
from services.trainer.samples.samples import BatchSamples, build_samples

RULES = CreditRules(weights=RewardWeights(alpha=1.0, beta=0.0, gamma=0.5))


def own(index: int, parent: int = -1, prefix: int = 0) -> pb.Turn:
    return pb.Turn(
        turn_index=index,
        parent_turn=parent,
        prefix_tokens=prefix,
        prompt_ids=int32_bytes([1, 10]),
        sampled=pb.SampledTokens(
            ids=int32_bytes([3]),
            logprobs=float32_bytes([-0.5]),
            weight_versions=int32_bytes([1]),
        ),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        finish_reason=pb.FINISH_REASON_STOP,
    )


def other(index: int) -> pb.Turn:
    return pb.Turn(
        turn_index=index,
        parent_turn=-1,
        messages_json='{"answer": {}}',
        other_model=pb.OtherModel(name="judge", kind="engine", sampled_tokens=9),
    )


def trajectory(rollout: int, turns: list[pb.Turn], credited: int) -> pb.Trajectory:
    """With an outcome at the end, and a process reward of the turn `credited`."""
    return pb.Trajectory(
        trajectory_id=f"t:{rollout}:0",
        domain="code",
        turns=turns,
        rewards=[
            pb.RewardEvent(event_id="a", kind=pb.REWARD_KIND_OUTCOME, value=rollout, turn_index=-1),
            pb.RewardEvent(
                event_id="b", kind=pb.REWARD_KIND_PROCESS, value=0.5, turn_index=credited
            ),
        ],
    )


def batch(turns: list[pb.Turn], credited: int) -> BatchSamples:
    return build_samples([[trajectory(each, turns, credited) for each in (0, 1)]], RULES)


def test_turns_of_other_models_change_no_sample() -> None:
    """Samples, advantages and outcomes are those of the same trajectory without them, although
    rewards are discounted by turn; they are counted."""
    plain = batch([own(0), own(1, parent=0, prefix=3), own(2)], credited=1)
    mixed = batch(
        [other(0), own(1), other(2), own(3, parent=1, prefix=3), other(4), other(5), own(6)],
        credited=4,
    )
    assert mixed.samples == plain.samples
    assert len(plain.samples) == 6
    assert len({bytes(one.advantages) for one in plain.samples}) > 2
    assert dict(mixed.left_out) == {("code", "other_model"): 8}
    unlike = ("left_out", "turns")
    for name in BatchSamples.__dataclass_fields__.keys() - {*unlike}:
        assert getattr(mixed, name) == getattr(plain, name), name


def test_reward_of_another_models_turn_counts_for_the_call_before_it() -> None:
    """Before the first turn of the policy: for that turn."""
    turns = [other(0), own(1), other(2), own(3)]
    found = []
    for credited in range(-1, 4):
        part, omitted = policy_part(trajectory(0, turns, credited))
        assert ([turn.turn_index for turn in part.turns], omitted) == ([0, 1], 2)
        found.append(part.rewards[1].turn_index)
    assert found == [-1, 0, 0, 0, 1]


def test_trajectory_of_the_policy_alone_is_not_copied() -> None:
    """A copy of a long one costs."""
    whole = trajectory(0, [own(0)], 0)
    assert policy_part(whole) == (whole, 0)
    assert policy_part(whole)[0] is whole


def test_trajectory_without_a_turn_of_the_policy_has_no_sample() -> None:
    """And stops no batch; its domain has nothing to train."""
    found = batch([other(0)], credited=-1)
    assert found.samples == ()


def test_samples_name_the_turns_of_the_pool() -> None:
    """Their indices before the other model's turns were left out."""
    found = batch([other(0), own(1), other(2), own(3, parent=1, prefix=3)], credited=1)
    assert [found.turns[one.number] for one in found.samples] == [
        ("t:0:0", 1),
        ("t:0:0", 3),
        ("t:1:0", 1),
        ("t:1:0", 3),
    ]
