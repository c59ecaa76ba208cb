"""Trajectory names, turn chains and the sequences they spell."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import InvalidArgument
from forge.core.token_columns import float32_array, float32_bytes, int32_array, int32_bytes
from forge.core.trajectory import (
    MAX_NUMBER,
    TaskId,
    TokenTree,
    TrajectoryName,
    TurnTokens,
    check_columns,
    check_task_id,
    parse_trajectory_id,
    sequence_lengths,
)

task_ids = st.text(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-", min_size=1, max_size=200
)
numbers = st.integers(0, MAX_NUMBER)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)


def turn(index: int, *, parent: int = -1, prefix: int = 0, prompt=(), sampled=()) -> TurnTokens:
    return TurnTokens(
        turn_index=index,
        parent_turn=parent,
        prefix_tokens=prefix,
        prompt_ids=int32_bytes(prompt),
        sampled_ids=int32_bytes(sampled),
        logprobs=float32_bytes([-0.5] * len(sampled)),
        weight_versions=int32_bytes([1] * len(sampled)),
    )


@st.composite
def trees(draw):
    """Turns of a random tree, with the sequences and contexts they spell, built naively."""
    sequences: list[Any] = []
    turns, contexts = [], []
    for index in range(draw(st.integers(1, 12))):
        parent = draw(st.integers(-1, index - 1))
        shareable = sequences[parent] if parent >= 0 else []
        prefix = draw(st.integers(0, len(shareable)))
        prompt, sampled = draw(ids), draw(ids)
        turns.append(turn(index, parent=parent, prefix=prefix, prompt=prompt, sampled=sampled))
        contexts.append(shareable[:prefix] + prompt)
        sequences.append(shareable[:prefix] + prompt + sampled)
    return turns, contexts, sequences


@given(tree=trees())
def test_sequences_are_rebuilt_from_the_new_tokens_of_turns(tree):
    """Every turn's context and full sequence are restored, for any sharing."""
    turns, contexts, sequences = tree
    rebuilt = TokenTree(turns)
    for index in range(len(turns)):
        assert list(int32_array(rebuilt.context(index))) == contexts[index]
        assert list(int32_array(rebuilt.sequence(index))) == sequences[index]
        assert rebuilt.lengths[index] == len(sequences[index])


def test_a_chain_of_ten_thousand_turns_is_rebuilt():
    """Depth costs no recursion: the last turn of a very long chain restores all of it."""
    turns = [
        turn(index, parent=index - 1, prefix=2 * index, prompt=[2], sampled=[3])
        for index in range(10_000)
    ]
    assert TokenTree(turns).lengths[-1] == 20_000
    assert list(int32_array(TokenTree(turns).sequence(9_999)))[-4:] == [2, 3, 2, 3]


@given(task_id=task_ids, rollout=numbers, attempt=numbers)
def test_an_id_names_exactly_one_rollout_attempt(task_id, rollout, attempt):
    """A built id is parsed back to the same task, rollout and attempt."""
    name = TrajectoryName(task_id=TaskId(task_id), rollout_index=rollout, attempt=attempt)
    assert parse_trajectory_id(name.trajectory_id) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "task",
        "task:0",
        "task:0:0:0",
        "task:-1:0",
        "task:01:0",
        "task:0:1\n",
        "task:\u0661:0",
        "ta sk:0:0",
        ":0:0",
        f"task:0:{MAX_NUMBER + 1}",
        "a" * 201 + ":0:0",
    ],
)
def test_a_malformed_id_is_refused_and_shown(text):
    """Any spelling but the canonical one is refused."""
    with pytest.raises(InvalidArgument, match="trajectory_id"):
        parse_trajectory_id(text)


@pytest.mark.parametrize("text", ["", "a:b", "a/b", "a b", "x" * 201, "\u00e4"])
def test_a_malformed_task_id_is_refused(text):
    """A task id is 1 to 200 of the characters that are safe in keys and file names."""
    with pytest.raises(InvalidArgument, match="task_id"):
        check_task_id(text)


@pytest.mark.parametrize(
    ("turns", "complaint"),
    [
        ([turn(1)], "turn 0 is missing"),
        ([turn(0), turn(0)], "turn 1 is missing"),
        ([turn(0, parent=0)], "parent_turn 0"),
        ([turn(0, parent=-2)], "parent_turn -2"),
        ([turn(0), turn(1, parent=1)], "parent_turn 1"),
        ([turn(0, prefix=1)], "has 0 tokens"),
        ([turn(0, prompt=[1, 2]), turn(1, parent=0, prefix=3)], "has 2 tokens"),
    ],
)
def test_turns_that_form_no_tree_are_refused(turns, complaint):
    """A missing turn, a parent that is not earlier, or too long a prefix is named."""
    with pytest.raises(InvalidArgument, match=complaint):
        sequence_lengths(turns)


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"prompt_ids": b"123"}, "prompt_ids"),
        ({"sampled_ids": b"12345"}, "sampled.ids"),
        ({"sampled_ids": b"1234"}, "sampled.logprobs"),
        ({"sampled_ids": b"1234", "logprobs": b"1234"}, "sampled.weight_versions"),
        ({"logprobs": b"1234"}, "sampled.logprobs"),
    ],
)
def test_ragged_columns_are_refused(columns, field):
    """Columns that are cut off or differ in count are refused, naming the field."""
    empty = {"prompt_ids": b"", "sampled_ids": b"", "logprobs": b"", "weight_versions": b""}
    with pytest.raises(InvalidArgument, match=field):
        check_columns(**(empty | columns))


@given(values=st.lists(st.floats(width=32)))
def test_log_probs_survive_bit_for_bit(values):
    """A float32 column is read back exactly, infinities and NaN included."""
    restored = float32_array(float32_bytes(values))
    assert all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(restored, values, strict=True)
    )
