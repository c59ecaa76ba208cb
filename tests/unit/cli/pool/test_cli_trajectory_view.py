"""The tree of one trajectory: which turns are one branch, and what a line says."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence

from rich.console import Console

from forge.cli.pool.token_value_rows import ValuedRows
from forge.cli.pool.trajectory_view import TrajectoryView
from forge.client.stored.token_values import CLIPPED, MASKED, TurnValues
from forge.client.stored.trajectory_tree import TrajectoryTree
from forge.v1 import common_pb2 as pb
from tests.support.pool.records import make_reward, make_turn

ANSWERED = 5
"""Tokens of the sequence of turn 0: a prompt of three and an answer of two."""


def trajectory(*turns: pb.Turn, rewards: Sequence[pb.RewardEvent] = ()) -> pb.Trajectory:
    return pb.Trajectory(trajectory_id="task:0:0", domain="code", turns=turns, rewards=rewards)


def drawn(one: pb.Trajectory, *, full: bool = False) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as shown:
        console.print(TrajectoryView(one).draw(full=full))
    return shown.get()


def test_turns_that_continue_each_other_are_one_branch() -> None:
    """One that shares only the prompt, and a second that continues, begin branches of their own."""
    one = trajectory(
        make_turn(index=0),
        make_turn(index=1, prefix=ANSWERED),
        make_turn(index=2, parent=0, prefix=3),
        make_turn(index=3, parent=0, prefix=ANSWERED),
        make_turn(index=4, parent=-1),
        make_turn(index=5, parent=1, prefix=2 * ANSWERED),
    )
    assert TrajectoryTree(one.turns).branches == [[0, 1, 5], [2], [3], [4]]
    shown = drawn(one)
    assert "4 branches · 6 turns · 12 sampled tokens" in shown
    assert "branch 2 · shares 3 tokens with turn 0" in shown
    assert "turn 1 · 8 prompt tokens, 3 of them new · 2 sampled by weights 1 · stop" in shown


def test_turns_out_of_training_are_marked() -> None:
    """Side calls by the rule, and turns that the agent excluded."""
    work = make_turn(index=0)
    work.offers_tools, work.system_digest = True, b"work"
    title = make_turn(index=1, parent=-1)
    excluded = make_turn(index=2, parent=0, prefix=ANSWERED)
    excluded.train, excluded.agent = False, "probe"
    lines = drawn(trajectory(work, title, excluded)).splitlines()
    marked = {line.split(" · ")[0][-6:]: line for line in lines if "turn " in line}
    assert "not trained" not in marked["turn 0"]
    assert marked["turn 1"].endswith("side call, not trained")
    assert marked["turn 2"].endswith("not trained, by its agent")


def test_messages_and_rewards_stand_at_their_turn() -> None:
    """A long message is cut to its beginning, and whole with `full`; a reward without a turn stands
    at the top."""
    answer = {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]}  # fmt: skip
    context = {"shared": 0, "messages": [{"role": "user", "content": "x" * 300}], "answer": answer}
    one = trajectory(
        make_turn(messages_json=json.dumps(context)),
        rewards=[make_reward(value=0.5), make_reward("late", turn_index=0)],
    )
    short, whole = drawn(one), drawn(one, full=True).replace("\n", "")
    assert 'assistant add({"a": 1})' in short
    assert "x" * 99 + "…" in short
    assert "x" * 200 not in short
    assert whole.count("x") >= 300
    top, turn = [line for line in short.splitlines() if "exact_answer" in line]
    assert "outcome exact_answer = 0.5" in top
    assert "turn 0" in turn and "process exact_answer = 1" in turn


def test_answers_of_other_models_are_named() -> None:
    """With their own count of tokens, as not trained; an external API's texts as they passed."""
    judge = pb.Turn(
        turn_index=1,
        parent_turn=-1,
        finish_reason=pb.FINISH_REASON_STOP,
        other_model=pb.OtherModel(
            name="judge", kind="external", prompt_tokens=11, sampled_tokens=3
        ),
        messages_json=json.dumps({"request": '{"a": 1}', "response": '{"b": 2}'}),
    )
    work = make_turn(index=0)
    work.offers_tools, work.system_digest = True, b"work"
    shown = drawn(trajectory(work, judge))
    line = "turn 1 · answer of judge (external) · 11 prompt tokens · 3 sampled · stop · not trained"
    assert line in shown
    assert 'request {"a": 1}' in shown and 'response {"b": 2}' in shown
    assert "2 branches · 2 turns · 2 sampled tokens" in shown


def test_turns_have_a_summary_of_their_token_values() -> None:
    """Where the trainer stores any; as JSON all of them. Without the option neither is said."""
    values = TurnValues(
        step=12,
        weight_version=7,
        logprobs=array("f", [-1.0, -2.0]),
        log_ratios=array("f", [0.0, 65504.0]),
        entropies=array("f", [0.5, 1.0]),
        advantages=array("f", [0.25, 0.25]),
        flags=bytearray([0, CLIPPED + MASKED]),
    )
    one = trajectory(make_turn(index=0), make_turn(index=1, prefix=ANSWERED))
    console = Console(width=200, no_color=True)
    with console.capture() as shown:
        console.print(TrajectoryView(one, {1: values}).draw())
    first, second = [line for line in shown.get().splitlines() if "turn " in line]
    assert first.endswith("no token values")
    assert second.endswith(
        "step 12: ratio 1 to e^6.55e+04, entropy 0.75, advantage 0.25, 1 clipped, 1 masked"
    )
    assert "token values" not in drawn(one)
    (row,) = ValuedRows({1: values}).json_row(one)["token_values"]
    assert (row["turn_index"], row["step"], row["log_ratios"]) == (1, 12, [0.0, 65504.0])
    assert (row["clipped"], row["masked"]) == ([False, True], [False, True])
