"""Side calls of an agent: recognized by rule or by label, and left out of training."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forge.core.credit.rewards import RewardWeights
from forge.core.credit.side_calls import side_calls
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.v1 import common_pb2 as pb
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.samples import BatchSamples, build_samples

WORK: Any = {"offers_tools": True, "system_digest": b"work"}
TITLE: Any = {"system_digest": b"title"}


SUMMARY = "The program subtracts; make it add.\nNothing is done yet."


def said(answer: str, *asked: str) -> dict[str, Any]:
    """The record of a request with these messages and of its answer."""
    messages = [{"role": "user", "content": text} for text in asked]
    record = {"messages": messages, "answer": {"role": "assistant", "content": answer}}
    return {"messages_json": json.dumps(record)}


def turns_of(*changes: Any) -> list[pb.Turn]:
    """Turns of a prompt of two tokens and an answer of one, each with its own context."""
    return [
        pb.Turn(
            **{
                "turn_index": index,
                "parent_turn": -1,
                "prompt_ids": int32_bytes([1, 10 + index]),
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "finish_reason": pb.FINISH_REASON_STOP,
            }
            | change,
            sampled=pb.SampledTokens(
                ids=int32_bytes([3]),
                logprobs=float32_bytes([-0.5]),
                weight_versions=int32_bytes([1]),
            ),
        )
        for index, change in enumerate(changes)
    ]


def found(*changes: Any) -> dict[int, str]:
    turns = turns_of(*changes)
    return dict(side_calls(turns, [2] * len(turns)))


def trained(*changes: Any, **rules: Any) -> BatchSamples:
    reward = pb.RewardEvent(event_id="r", kind=pb.REWARD_KIND_OUTCOME, value=1, turn_index=-1)
    weights = RewardWeights(alpha=0.0, beta=0.0, gamma=1.0)
    group = [
        pb.Trajectory(
            trajectory_id=f"t:0:{attempt}",
            domain="code",
            turns=turns_of(*changes),
            rewards=[reward] * attempt,
        )
        for attempt in (0, 1)
    ]
    return build_samples([group], CreditRules(weights=weights, **rules))


def test_call_for_a_title_is_a_side_call() -> None:
    """It offers no tools, has its own system prompt, and its answer is not continued."""
    assert found(WORK, TITLE) == {1: "side_call"}


def test_turns_that_lack_one_sign_are_no_side_calls() -> None:
    """Same system prompt, tools, or a continuation: each makes a turn part of the work."""
    same_prompt = {"system_digest": b"work"}
    sub_agent = {"offers_tools": True, "system_digest": b"sub"}
    continuation = {"parent_turn": 1, "prefix_tokens": 3}
    assert found(WORK, same_prompt) == {}
    assert found(WORK, sub_agent) == {}
    assert found(WORK, TITLE, WORK | continuation) == {}


@pytest.mark.parametrize("retold", [SUMMARY, "Nothing is done yet.", f"<summary>\n{SUMMARY}\n\n"])
def test_summary_that_a_later_request_has_is_no_side_call(retold: str) -> None:
    """Whole or in part: it replaces the history, and rewards say how well it does."""
    summary = TITLE | said(SUMMARY, "Summarize.")
    assert found(WORK, summary, WORK | said("", f"So far: {retold}")) == {}
    assert found(WORK, summary, WORK | said("", "Go on.")) == {1: "side_call"}
    assert found(WORK | said("", f"So far: {retold}"), summary) == {1: "side_call"}


def test_title_in_the_words_of_the_task_is_a_side_call() -> None:
    """The task has them, not the answer; nor do a few common words show anything."""
    task = "Make the program calc.py add."
    title = TITLE | said("Make the program calc.py add", f"A title for: {task}")
    assert found(title, WORK | said("", task)) == {0: "side_call"}
    assert found(TITLE | said("Calc"), WORK | said("", "Calc is wrong.")) == {0: "side_call"}


def test_shared_prompt_is_no_continuation() -> None:
    """Two side calls with one beginning share a prefix and continue no answer."""
    assert found(WORK, TITLE, TITLE | {"parent_turn": 1, "prefix_tokens": 2}) == {
        1: "side_call",
        2: "side_call",
    }


def test_agents_without_tools_have_no_side_calls() -> None:
    """Without a turn with tools nothing shows which calls are the work, as in older records."""
    assert found({"system_digest": b"a"}, {"system_digest": b"b"}) == {}


def test_label_of_the_agent_decides_before_the_rule() -> None:
    """`train` false leaves out any turn, true keeps a title."""
    assert found(WORK | {"train": False}, TITLE | {"train": True}, WORK) == {0: "excluded"}


def test_side_calls_are_left_out_and_counted() -> None:
    """They get no sample; the other turns keep theirs."""
    batch = trained(WORK, TITLE, WORK | {"train": False})
    assert len(batch.samples) == 2
    assert dict(batch.left_out) == {("code", "side_call"): 2, ("code", "excluded"): 2}


def test_domain_may_train_its_side_calls() -> None:
    """Labels of the agent still count."""
    batch = trained(WORK, TITLE, WORK | {"train": False}, train_side_calls=frozenset({"code"}))
    assert len(batch.samples) == 4
    assert dict(batch.left_out) == {("code", "excluded"): 2}
