"""What the edge refuses, and that it says which field and value."""

from __future__ import annotations

import math

import pytest

from forge.core.errors import InvalidArgument
from forge.core.tasks.validation import MAX_PAYLOAD_BYTES
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.v1 import common_pb2, pool_pb2
from services.pool import validation
from services.pool.storage.keys import MAX_EVENT_ID_BYTES
from tests.support.pool.records import make_group, make_reward, make_turn

SEALED = common_pb2.TRAJECTORY_STATE_SEALED


def with_fields(message, **fields):
    for path, value in fields.items():
        *parents, name = path.split("__")
        target = message
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)
    return message


def test_valid_turn_keeps_its_bytes():
    """It passes unchanged, with token counts and version range extracted."""
    turn = make_turn("t:3:1", 2, parent=0, prefix=4, version=9)
    serialized = turn.SerializeToString()
    new = validation.new_turn(serialized)
    assert new.serialized == serialized
    assert str(new.trajectory) == "t:3:1"
    assert (new.head.turn_index, new.head.parent_turn, new.head.prefix_tokens) == (2, 0, 4)
    assert (new.head.prompt_tokens, new.head.sampled_tokens) == (3, 2)
    assert (new.head.min_weight_version, new.head.max_weight_version) == (9, 9)


def test_turn_without_sampled_tokens_is_valid():
    """A call aborted before its first token is recorded."""
    head = validation.new_turn(make_turn(sampled=()).SerializeToString()).head
    assert (head.sampled_tokens, head.min_weight_version) == (0, -1)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"trajectory_id": "task"}, "trajectory_id 'task'"),
        ({"parent_turn": 0}, "parent_turn 0"),
        ({"parent_turn": -2}, "parent_turn -2"),
        ({"prefix_tokens": 1}, "prefix_tokens is 1"),
        ({"prompt_ids": b"12345"}, "prompt_ids has 5 bytes"),
        ({"prompt_ids": int32_bytes([-1])}, "prompt_ids holds -1"),
        ({"sampled__ids": b"123"}, "sampled.ids has 3 bytes"),
        ({"sampled__ids": int32_bytes([1, -7])}, "sampled.ids holds -7"),
        ({"sampled__logprobs": b""}, "sampled.logprobs has 0 bytes"),
        ({"sampled__logprobs": float32_bytes([math.nan, 0])}, "sampled.logprobs"),
        ({"sampled__logprobs": float32_bytes([0, -math.inf])}, "sampled.logprobs"),
        ({"sampled__weight_versions": b"1234"}, "sampled.weight_versions has 4 bytes"),
        ({"sampled__weight_versions": int32_bytes([1, -1])}, "sampled.weight_versions holds -1"),
        ({"sampled__routed_experts__ids": b"123"}, "routed_experts has layers = 0"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": math.nan}, "top_p nan"),
    ],
)
def test_invalid_turn_is_refused_by_field_and_value(fields, complaint):
    """Each malformed field is named with its fault."""
    turn = with_fields(make_turn(), **fields)
    with pytest.raises(InvalidArgument, match=complaint):
        validation.new_turn(turn.SerializeToString())


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff", make_turn().SerializeToString()[:-1], b""])
def test_bytes_that_are_no_turn_are_refused(garbage):
    """Garbage, a truncated turn and empty bytes are INVALID_ARGUMENT."""
    with pytest.raises(InvalidArgument):
        validation.new_turn(garbage)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"value": math.nan}, "exact_answer.* nan"),
        ({"value": math.inf}, "exact_answer.* inf"),
        ({"value": -math.inf}, "exact_answer.* -inf"),
        ({"event_id": ""}, "event_id of 0 bytes"),
        ({"event_id": "x" * (MAX_EVENT_ID_BYTES + 1)}, "event_id of 257 bytes"),
        ({"name": ""}, "reward outcome has no name"),
        ({"kind": 0}, "kind 0"),
        ({"kind": 99}, "kind 99"),
        ({"turn_index": -2}, "turn_index -2"),
    ],
)
def test_invalid_reward_is_refused_by_name_and_value(fields, complaint):
    """A reward that is not finite, or not a reward, names its field and value."""
    reward = with_fields(make_reward(), **fields)
    with pytest.raises(InvalidArgument, match=complaint):
        validation.append_rewards(
            pool_pb2.AppendRewardsRequest(trajectory_id="t:0:0", rewards=[reward])
        )
    with pytest.raises(InvalidArgument, match=complaint):
        validation.seal_trajectory(
            pool_pb2.SealTrajectoryRequest(trajectory_id="t:0:0", state=SEALED, rewards=[reward]),
            now_unix_s=0.0,
        )


def test_negative_reward_is_valid():
    """Penalties are rewards below zero."""
    request = pool_pb2.AppendRewardsRequest(trajectory_id="t:0:0", rewards=[make_reward(value=-1)])
    assert validation.append_rewards(request).rewards[0].value == -1


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"trajectory_id": ""}, "trajectory_id ''"),
        ({"task_id": "other"}, "task_id 'other'"),
        ({"state": 0}, "state 0"),
        ({"state": common_pb2.TRAJECTORY_STATE_OPEN}, "state 1"),
        ({"closing_agent_s": -0.5}, "closing_agent_s is -0.5"),
        ({"closing_agent_s": math.inf}, "closing_agent_s is inf"),
    ],
)
def test_invalid_seal_is_refused(fields, complaint):
    """A seal must name a trajectory, its own task, and a final state."""
    request = with_fields(
        pool_pb2.SealTrajectoryRequest(trajectory_id="t:0:0", task_id="t", state=SEALED), **fields
    )
    with pytest.raises(InvalidArgument, match=complaint):
        validation.seal_trajectory(request, now_unix_s=0.0)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"task__task_id": "a:b"}, "task_id 'a:b'"),
        ({"task__group_size": 0}, "group_size 0"),
        ({"task__purpose": 0}, "purpose 0"),
        ({"task__payload_json": "x" * (MAX_PAYLOAD_BYTES + 1)}, "1 MiB"),
        ({"pool_shard": "s1"}, "belongs to pool shard 's1', not to 's0'"),
    ],
)
def test_invalid_group_is_refused(fields, complaint):
    """A group must hold a usable task and be meant for this shard."""
    request = pool_pb2.PutGroupsRequest(groups=[with_fields(make_group(), **fields)])
    with pytest.raises(InvalidArgument, match=complaint):
        validation.put_groups(request, shard="s0")


@pytest.mark.parametrize(("task_id", "state"), [("a b", 1), ("a", 0), ("a", 77)])
def test_invalid_change_of_state_is_refused(task_id, state):
    """A change must name a task and a state that exists."""
    changes = [pool_pb2.SetGroupStatesRequest.Change(task_id=task_id, state=state)]
    with pytest.raises(InvalidArgument, match=f"{task_id}"):
        validation.set_group_states(pool_pb2.SetGroupStatesRequest(changes=changes), now_unix_s=1.0)
