"""Rows of an export: tokens bit for bit, conversations as chat templates read them, pairs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from pyarrow import parquet

from forge.cli.exports.chat_rows import (
    ChatRow,
    preference_row,
    preference_rows,
    sft_row,
    sft_rows,
)
from forge.cli.exports.files import RowFormat, export_file
from forge.cli.exports.token_rows import TokenRow, TokenRows, token_rows
from forge.client.group_credit import turn_advantages
from forge.client.stored.conversations import StoredConversation, conversations
from forge.core.conversation.messages import Message
from forge.core.errors import FailedPrecondition, InvalidArgument
from forge.core.token_columns import float32_array, float32_bytes, int32_array
from forge.v1 import common_pb2 as pb
from tests.support.gateway.chat_templates import make_tokenizer
from tests.support.gateway.conversations import LINEAR, TOOLS, Session, result, user
from tests.support.pool.records import make_reward, make_turn, recorded_tree

ANSWERED = 5
"""Tokens of the sequence of turn 0: a prompt of three and an answer of two."""


def written(path: Path, rows: RowFormat[Any], *lines: Any) -> list[dict[str, Any]]:
    """Writes an export and reads it back as plain rows."""
    with export_file(path, rows) as writer:
        for line in lines:
            writer.add(line)
    if path.suffix == ".parquet":
        plain: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return plain
    return [json.loads(line) for line in path.open()]


def recorded(session: Session) -> pb.Trajectory:
    """The trajectory of a session, as the pool has it."""
    turns = [pb.Turn.FromString(turn.SerializeToString()) for turn in session.turns]
    for turn in turns:
        turn.temperature = 1.0
    return pb.Trajectory(trajectory_id="task:0:0", domain="code", turns=turns)


def sft_of(trajectory: pb.Trajectory) -> list[ChatRow]:
    talks, _ = conversations(trajectory.turns)
    return [sft_row(one, trajectory_id="task:0:0", domain="code", reward=1.0) for one in talks]


def agent_session(family: str) -> Session:
    """Two questions; the first one with a call where the family has calls."""
    with_calls = family == "chatml"
    session = Session(family, tools=TOOLS if with_calls else [])
    history = [Message(role="system", content="Be brief."), user("One?")]
    said = ["It is 1.", "It is 2."]
    if with_calls:
        said.insert(0, '<tool_call>\n{"name": "look", "arguments": {"at": "shelf"}}\n</tool_call>')
    for number, text in enumerate(said):
        answer = session.turn(history, text)
        after = result("42", answer.call_ids[0]) if answer.tool_calls else user(f"And {number}?")
        history = [*history, answer, after]
    return session


@pytest.mark.parametrize("family", LINEAR)
def test_exported_conversation_renders_to_the_recorded_ids(family: str, tmp_path: Path) -> None:
    """The model's chat template gives the prompt and the answer of the last turn, id for id, and
    behind them only what it writes after an answer."""
    session = agent_session(family)
    (row,) = written(tmp_path / "sft.jsonl", sft_rows("object"), *sft_of(recorded(session)))
    tokenizer = make_tokenizer(family)
    text = tokenizer.apply_chat_template(
        row["messages"], tools=row.get("tools"), tokenize=False, **row["chat_template_kwargs"]
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    sequence = int32_array(recorded_tree(session.turns).sequence(len(session.turns) - 1)).tolist()
    assert ids[: len(sequence)] == sequence
    assert tokenizer.decode(ids[len(sequence) :]).strip() == ""


def test_datasets_reads_conversations_with_different_calls(tmp_path: Path) -> None:
    """A call keeps its own arguments: no column of one row appears in another."""
    rows = [*sft_of(recorded(agent_session("chatml"))), *sft_of(recorded(agent_session("smollm2")))]
    lines = written(tmp_path / "sft.jsonl", sft_rows("object"), *rows)
    loaded = datasets.load_dataset(
        "json",
        data_files=str(tmp_path / "sft.jsonl"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert [row["messages"] for row in loaded] == [line["messages"] for line in lines]
    assert loaded[0]["tools"] == TOOLS and loaded[0]["chat_template_kwargs"] == {}
    call = loaded[0]["messages"][2]["tool_calls"][0]["function"]
    assert call == {"name": "look", "arguments": {"at": "shelf"}}


def test_parquet_has_the_messages_of_json_lines(tmp_path: Path) -> None:
    """Arguments and tools are texts of JSON there, and absent keys are null."""
    rows = sft_of(recorded(agent_session("chatml")))
    (line,) = written(tmp_path / "sft.jsonl", sft_rows("text"), *rows)
    (row,) = written(tmp_path / "sft.parquet", sft_rows("object"), *rows)
    messages = [
        {key: value for key, value in message.items() if value is not None}
        for message in row["messages"]
    ]
    assert messages == line["messages"]
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == '{"at": "shelf"}'
    assert json.loads(row["tools"]) == line["tools"] == TOOLS
    facts = ("trajectory_id", "task_id", "domain", "turn_index", "reward")
    assert {name: row[name] for name in facts} == {name: line[name] for name in facts}


def test_each_branch_is_a_conversation() -> None:
    """An edit of the history ends one conversation; the shared beginning is in both."""
    session = Session("chatml")
    first = session.turn([user("One?")], "Yes.")
    session.turn([user("One?"), first, user("Two?")], "Two.")
    session.turn([user("Summary of before."), user("Three?")], "Three.")
    talks, unused = conversations(session.turns)
    assert [[one.content for one in talk.messages] for talk in talks] == [
        ["One?", "Yes.", "Two?", "Two."],
        ["Summary of before.", "Three?", "Three."],
    ]
    assert [sorted(talk.answers) for talk in talks] == [[1, 3], [2]]
    assert not unused


def test_turns_without_a_conversation_are_counted() -> None:
    """Of other models, left by the agent, over ids alone, unreadable, excluded by the agent."""
    session = Session("chatml")
    session.turn([user("One?")], "Yes.")
    session.turn([user("Two?")], "No.")
    session.turn([user("Three?")], "Maybe.")
    session.turns[1].finish_reason = pb.FINISH_REASON_ABORTED
    session.turns[2].train = False
    other = make_turn(index=3, parent=-1, prompt=(), sampled=())
    other.other_model.name = "judge"
    odd = [make_turn(index=4, parent=-1), make_turn(index=5, parent=-1, messages_json="{}")]
    talks, unused = conversations([*session.turns, other, *odd])
    assert [talk.turn_index for talk in talks] == [0]
    assert unused == {"aborted": 1, "excluded": 1, "other_model": 1, "no_messages": 2}


def tree_of_turns() -> list[pb.Turn]:
    """Turn 1 continues turn 0, turn 2 as well, turn 3 shares half of turn 0's answer."""
    turns = [
        make_turn(index=0, sampled=(4, 5)),
        make_turn(index=1, parent=0, prefix=ANSWERED, prompt=(6,), sampled=(7,), version=2),
        make_turn(index=2, parent=0, prefix=ANSWERED, prompt=(8,), sampled=(9,), version=3),
        make_turn(index=3, parent=0, prefix=ANSWERED - 1, prompt=(10,), sampled=(11,), version=4),
    ]
    for turn in turns:
        count = len(turn.sampled.ids) // 4
        # 0.1 is no float32: its bits show any conversion.
        turn.sampled.logprobs = float32_bytes(-0.1 - turn.turn_index for _ in range(count))
    turns[1].sampled.allowed_logprobs = float32_bytes([-0.3])
    return turns


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_token_rows_have_the_record_bit_for_bit(suffix: str, tmp_path: Path) -> None:
    """Each sampled token has mask 1 in exactly one row, there with its id, log-prob and version as
    stored and in its own context."""
    turns = tree_of_turns()
    trajectory = pb.Trajectory(trajectory_id="task:0:0", domain="code", turns=turns)
    made, untrained = token_rows(trajectory, [0.5, 1.5, 2.5, 3.5], 1.0)
    rows = written(tmp_path / f"tokens{suffix}", TokenRows(), *made)
    assert not untrained
    assert [row["turn_index"] for row in rows] == [1, 2, 3]
    tree = recorded_tree(turns)
    seen = []
    for row in rows:
        assert row["input_ids"] == int32_array(tree.sequence(row["turn_index"])).tolist()
        assert sum(row["loss_mask"]) == sum(span["stop"] - span["start"] for span in row["turns"])
        for span in row["turns"]:
            at = slice(span["start"], span["stop"])
            sampled = turns[span["turn_index"]].sampled
            seen.append(span["turn_index"])
            assert (
                row["input_ids"][: span["start"]]
                == int32_array(tree.context(span["turn_index"])).tolist()
            )
            assert float32_bytes(row["logprobs"][at]) == sampled.logprobs
            assert row["input_ids"][at] == int32_array(sampled.ids).tolist()
            assert row["weight_versions"][at] == int32_array(sampled.weight_versions).tolist()
            assert row["advantages"][at] == [span["turn_index"] + 0.5] * len(row["logprobs"][at])
            assert row["loss_mask"][at] == [1] * len(row["logprobs"][at])
    assert sorted(seen) == [0, 1, 2, 3]
    assert float32_bytes(rows[0]["allowed_logprobs"][-1:]) == turns[1].sampled.allowed_logprobs
    unmasked = [
        (row["logprobs"][at], row["advantages"][at], row["weight_versions"][at])
        for row in rows
        for at, mask in enumerate(row["loss_mask"])
        if not mask
    ]
    assert set(unmasked) == {(0.0, 0.0, -1)}


def test_untrained_turns_have_no_mask_and_are_counted() -> None:
    """Greedy, left by the agent, excluded: they stay in the context of later turns."""
    turns = [
        make_turn(index=0),
        make_turn(index=1, prefix=ANSWERED),
        make_turn(index=2, prefix=2 * ANSWERED),
        make_turn(index=3, prefix=3 * ANSWERED),
    ]
    turns[0].temperature = 0.0
    turns[1].finish_reason = pb.FINISH_REASON_ABORTED
    turns[2].train = False
    (row,), untrained = token_rows(pb.Trajectory(turns=turns), [1.0] * 4, None)
    assert untrained == {"greedy": 1, "aborted": 1, "excluded": 1}
    assert row.loss_mask == bytes(18) + b"\1\1"


def test_columns_of_unequal_length_are_refused() -> None:
    """A row must not shift the columns of the tokens after it."""
    turns = [make_turn(index=0)]
    turns[0].sampled.allowed_logprobs = float32_bytes([0.0])
    with pytest.raises(InvalidArgument, match="allowed_logprobs"):
        token_rows(pb.Trajectory(turns=turns), [1.0], None)


def test_unknown_advantages_are_null(tmp_path: Path) -> None:
    """Of an abandoned trajectory, say: 0 would be a number like any other."""
    rows, _ = token_rows(pb.Trajectory(turns=[make_turn()]), [math.nan], None)
    (row,) = written(tmp_path / "tokens.jsonl", TokenRows(), *rows)
    assert row["advantages"] == [0.0, 0.0, 0.0, None, None]


def summary(name: str, value: float, turns: int = 1) -> pb.TrajectorySummary:
    return pb.TrajectorySummary(
        trajectory_id=name,
        state=pb.TRAJECTORY_STATE_SEALED,
        turns=turns,
        rewards=[make_reward(value=value)],
    )


def test_advantage_is_the_reward_above_the_mean_of_the_group() -> None:
    """Over sealed trajectories with tokens; freed and abandoned ones count for nothing."""
    group = [summary("a:0:0", 1.0), summary("a:1:0", 0.0, turns=2), summary("a:2:0", 7.0)]
    group[2].freed = True
    abandoned = summary("a:3:0", 7.0)
    abandoned.state = pb.TRAJECTORY_STATE_ABANDONED
    assert turn_advantages([*group, abandoned]) == {"a:0:0": [0.5], "a:1:0": [-0.5, -0.5]}


def talk(*texts: str, calls: Sequence[dict[str, Any]] = ()) -> StoredConversation:
    """A conversation of user and policy in turn."""
    messages = [
        Message(role="assistant" if at % 2 else "user", content=text)
        for at, text in enumerate(texts)
    ]
    return StoredConversation(
        turn_index=0,
        messages=tuple(messages),
        answers=frozenset(range(1, len(texts), 2)),
        tools=calls,
        template_kwargs={},
    )


def test_pair_splits_before_the_first_different_answer(tmp_path: Path) -> None:
    """Equal answers with different consequences belong to the completions: the policy did not write
    what followed them."""
    facts = {"task_id": "a", "domain": "d", "chosen_id": "a:0:0", "rejected_id": "a:1:0"} | {
        "chosen_reward": 1.0,
        "rejected_reward": 0.0,
        "margin": 1.0,
    }
    left, right = talk("q", "same", "r1", "good"), talk("q", "same", "r1", "bad")
    other = talk("q", "same", "r2", "bad")
    rows = [preference_row(left, right, facts=facts), preference_row(left, other, facts=facts)]
    for suffix in (".jsonl", ".parquet"):
        lines = written(tmp_path / f"pairs{suffix}", preference_rows("object"), *rows)
        texts = [
            [[one["content"] for one in line[name]] for name in ("prompt", "chosen", "rejected")]
            for line in lines
        ]
        assert texts == [
            [["q", "same", "r1"], ["good"], ["bad"]],
            [["q"], ["same", "r1", "good"], ["same", "r2", "bad"]],
        ]
        assert [line["margin"] for line in lines] == [1.0, 1.0]


def test_unlike_conversations_are_no_pair() -> None:
    """Other prompts, other tools, or no difference at all."""
    left = talk("q", "good")
    for right in (talk("p", "bad"), talk("q", "bad", calls=TOOLS), talk("q", "good")):
        assert preference_row(left, right, facts={}) is None


def test_interrupted_export_leaves_no_file(tmp_path: Path) -> None:
    """Neither under its name nor under another; a row that cannot be written is no half line."""
    for suffix in (".jsonl", ".parquet"):
        with (
            pytest.raises(KeyboardInterrupt),
            export_file(tmp_path / f"half{suffix}", TokenRows()) as writer,
        ):
            rows, _ = token_rows(pb.Trajectory(turns=[make_turn()]), [1.0], None)
            writer.add(rows[0])
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_two_exports_do_not_mix_in_one_file(tmp_path: Path, suffix: str) -> None:
    """The later one is refused; the file has the rows of the first one, and none of a third that
    was killed before."""
    path = tmp_path / f"both{suffix}"
    path.with_name(f".{path.name}.unfinished").write_bytes(b"rows of a killed export")
    rows, _ = token_rows(pb.Trajectory(turns=[make_turn()]), [1.0], None)
    with export_file(path, TokenRows()) as first:
        first.add(rows[0])
        with (
            pytest.raises(FailedPrecondition, match="another process writes"),
            export_file(path, TokenRows()),
        ):
            pass
        first.add(rows[0])
    found = parquet.read_table(path).to_pylist() if suffix == ".parquet" else path.open()
    assert len(list(found)) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_row_groups_bound_the_memory_of_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is written when it is full: the file has several, and every row once."""
    monkeypatch.setattr("forge.cli.exports.files.ROW_GROUP_BYTES", 1000)
    rows: list[TokenRow] = []
    for number in range(40):
        made, _ = token_rows(
            pb.Trajectory(trajectory_id=f"t{number}:0:0", turns=[make_turn()]), [1.0], None
        )
        rows += made
    path = tmp_path / "tokens.parquet"
    read = written(path, TokenRows(), *rows)
    assert [row["task_id"] for row in read] == [f"t{number}" for number in range(40)]
    assert parquet.ParquetFile(path).num_row_groups > 1
    assert float32_array(rows[0].advantages)[-1] == 1.0
