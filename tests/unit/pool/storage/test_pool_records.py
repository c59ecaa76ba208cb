"""Keys sort as names do, values come back or are known to be damaged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import DataLoss
from forge.core.trajectory import MAX_NUMBER, TaskId, TrajectoryName
from services.pool.storage import keys
from services.pool.storage.records import (
    TrajectoryHeader,
    TurnHead,
    checksummed_value,
    decode_header,
    decode_turn_head,
    encode_header,
    encode_turn_head,
    open_value,
    turn_of_payload,
)
from services.pool.storage.tables import Table

ALPHABET = "abcXYZ019._-"
task_ids = st.text(ALPHABET, min_size=1, max_size=12)
numbers = st.integers(0, MAX_NUMBER)
names = st.builds(
    lambda task, rollout, attempt: TrajectoryName(
        task_id=TaskId(task), rollout_index=rollout, attempt=attempt
    ),
    task_ids,
    numbers,
    numbers,
)
int32 = st.integers(-(2**31), 2**31 - 1)
uint32 = st.integers(0, 2**32 - 1)


@given(name=names)
def test_trajectory_key_is_read_back(name):
    """A key gives the name it was made of."""
    assert keys.name_of_trajectory_key(keys.trajectory_key(name)) == name


@given(name=names, index=uint32)
def test_turn_key_extends_its_trajectory_key(name, index):
    """It ends in the turn's index."""
    key = keys.turn_key(keys.trajectory_key(name), index)
    assert key.startswith(keys.trajectory_key(name))
    assert keys.index_of_turn_key(key) == index


@given(first=names, second=names)
def test_no_trajectory_key_is_a_prefix_of_another(first, second):
    """A prefix scan over one trajectory, or one task, reads no other records."""
    if first != second:
        assert not keys.trajectory_key(first).startswith(keys.trajectory_key(second))
    in_task = keys.trajectory_key(first).startswith(keys.task_prefix(second.task_id))
    assert in_task == (first.task_id == second.task_id)


@given(name=names, first=uint32, second=uint32)
def test_turn_keys_sort_by_turn_index(name, first, second):
    """Bytes sort as turn indices do."""
    trajectory = keys.trajectory_key(name)
    in_order = keys.turn_key(trajectory, first) < keys.turn_key(trajectory, second)
    assert in_order == (first < second)


queued = st.tuples(st.integers(0, 2), st.integers(0, 2**64 - 1), task_ids)


@given(first=queued, second=queued)
def test_group_keys_sort_in_queue_order(first, second):
    """By purpose, then by queue index, and each names its task."""
    if first[:2] != second[:2]:
        assert (keys.queue_key(*first) < keys.queue_key(*second)) == (first[:2] < second[:2])
    assert keys.task_of_queue_key(keys.queue_key(*first)) == first[2]


def test_the_longest_key_fits():
    """The longest names allowed stay within the 511 bytes LMDB takes as a key."""
    longest = TrajectoryName(task_id=TaskId("t" * 200), rollout_index=0, attempt=MAX_NUMBER)
    key = keys.reward_key(keys.trajectory_key(longest), "e" * keys.MAX_EVENT_ID_BYTES)
    assert len(key) <= 511


@given(key=st.binary(min_size=1, max_size=40), payload=st.binary(max_size=200))
def test_sealed_value_is_read_back(key, payload):
    """Under its key."""
    assert open_value(Table.TURNS, key, checksummed_value(key, payload)) == payload


@given(
    key=st.binary(min_size=1, max_size=40),
    payload=st.binary(max_size=200),
    bit=st.integers(min_value=0),
)
def test_flipped_bit_is_data_loss(key, payload, bit):
    """Any single wrong bit, in checksum or payload, is detected and the table named."""
    damaged = bytearray(checksummed_value(key, payload))
    position = bit % (8 * len(damaged))
    damaged[position // 8] ^= 1 << position % 8
    with pytest.raises(DataLoss, match="turns"):
        open_value(Table.TURNS, key, bytes(damaged))


@given(payload=st.binary(max_size=50), cut=st.integers(1, 54))
def test_truncated_value_is_data_loss(payload, cut):
    """A shortened value, even an empty one, is detected."""
    value = checksummed_value(b"key", payload)
    with pytest.raises(DataLoss):
        open_value(Table.REWARDS, b"key", value[: max(0, len(value) - cut)])


def test_value_under_another_key_is_data_loss():
    """A whole value in the wrong place is damage too."""
    with pytest.raises(DataLoss):
        open_value(Table.TURNS, b"other", checksummed_value(b"key", b"payload"))


heads = st.builds(
    TurnHead,
    turn_index=uint32,
    parent_turn=int32,
    prefix_tokens=uint32,
    prompt_tokens=uint32,
    sampled_tokens=uint32,
    min_weight_version=int32,
    max_weight_version=int32,
)


@given(head=heads, turn=st.binary(max_size=100))
def test_turn_and_its_head_are_read_apart(head, turn):
    """The head is read without the turn, the turn without the head."""
    payload = encode_turn_head(head) + turn
    assert decode_turn_head(head.turn_index, payload) == head
    assert turn_of_payload(payload) == turn


@given(
    header=st.builds(
        TrajectoryHeader,
        state=st.integers(1, 3),
        domain=st.text(),
        turns=uint32,
        sampled_tokens=st.integers(0, 2**63),
        min_weight_version=int32,
        max_weight_version=int32,
        sealed_unix_s=st.floats(allow_nan=False),
        reason=st.text(),
    )
)
def test_trajectory_header_is_read_back(header):
    """Every field of a trajectory's header survives."""
    assert decode_header(encode_header(header)) == header


def test_header_of_an_earlier_version_is_read():
    """Missing fields have their defaults."""
    assert decode_header(b"\x91\x02") == TrajectoryHeader(state=2)
