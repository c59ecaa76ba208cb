"""Draws one trajectory as a tree: branches, turns, tokens, labels, rewards and texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.text import Text
from rich.tree import Tree

from forge.cli.pool.token_value_rows import Values, summary_of
from forge.client.reward_events import REWARD_KINDS
from forge.client.stored.trajectory_tree import TrajectoryTree, sampled_tokens
from forge.core.enum_words import enum_word
from forge.core.token_columns import TOKEN_BYTES, int32_array
from forge.core.trajectory import NO_PARENT
from forge.v1 import common_pb2 as pb

LINE_CHARACTERS = 100
"""Characters of a message on its line, without `full`."""
_UNTRAINED = {"side_call": "side call, not trained", "excluded": "not trained, by its agent"}
_ROLE_STYLE = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


class TrajectoryView:
    """The branches of one trajectory."""

    def __init__(self, trajectory: pb.Trajectory, values: Values | None = None) -> None:
        """With `values` each turn has a summary of its token values. Raises `InvalidArgument` if
        the turns form no tree."""
        self._trajectory = trajectory
        self._values = values
        self._turns = trajectory.turns
        self._tree = TrajectoryTree(self._turns)

    def draw(self, *, full: bool = False) -> Tree:
        """Return the tree; `full` has whole messages in place of their first characters."""
        tree = Tree(Text.from_markup(self._heading()))
        for reward in self._trajectory.rewards:
            if reward.turn_index == NO_PARENT:
                tree.add(Text.from_markup(_reward(reward)))
        numbers = {branch[0]: number for number, branch in enumerate(self._tree.branches, 1)}
        self._add_branches(tree, NO_PARENT, numbers, full)
        return tree

    def _add_branches(
        self, tree: Tree, parent: int, numbers: Mapping[int, int], full: bool
    ) -> None:
        for first in self._tree.forks.get(parent, ()):
            branch = tree.add(Text.from_markup(self._title(first, numbers[first])))
            for index in self._tree.branch(first):
                node = branch.add(Text.from_markup(self._line(index)))
                for text in self._texts(index, full):
                    node.add(text)
                self._add_branches(node, index, numbers, full)

    def _heading(self) -> str:
        one = self._trajectory
        state = enum_word(pb.TrajectoryState, one.state)
        sampled = sum(map(sampled_tokens, self._turns))
        parts = [
            f"[bold]{escape(one.trajectory_id)}[/bold]",
            escape(one.domain),
            state,
            _count(len(self._tree.branches), "branch", "branches"),
            _count(len(self._turns), "turn"),
            _count(sampled, "sampled token"),
            escape(one.reason),
        ]
        return " · ".join(part for part in parts if part)

    def _title(self, first: int, number: int) -> str:
        turn = self._turns[first]
        parts = [f"[bold]branch {number}[/bold]"]
        if turn.parent_turn != NO_PARENT:
            parts.append(f"shares {turn.prefix_tokens} tokens with turn {turn.parent_turn}")
        if turn.agent:
            parts.append(f"agent {escape(turn.agent)}")
        return " · ".join(parts)

    def _line(self, index: int) -> str:
        turn = self._turns[index]
        finish = enum_word(pb.FinishReason, turn.finish_reason)
        parts = [f"[bold]turn {index}[/bold]", *self._tokens(index), finish]
        if turn.HasField("other_model"):
            parts.append("[yellow]not trained[/yellow]")
        elif why := self._tree.aside.get(index):
            parts.append(f"[yellow]{_UNTRAINED[why]}[/yellow]")
        if turn.HasField("asked_temperature"):
            parts.append(f"asked for temperature {turn.asked_temperature:g}")
        if turn.context_action:
            parts.append(f"[blue]{escape(turn.context_action)}[/blue]")
        if turn.parse_error:
            parts.append("[red]cannot be parsed[/red]")
        if self._values is not None:
            parts.append(f"[magenta]{summary_of(self._values.get(index))}[/magenta]")
        parts += [_reward(one) for one in self._trajectory.rewards if one.turn_index == index]
        return " · ".join(parts)

    def _tokens(self, index: int) -> Iterator[str]:
        turn = self._turns[index]
        if turn.HasField("other_model"):
            other = turn.other_model
            yield f"answer of {escape(other.name)} ({escape(other.kind)})"
            yield f"{other.prompt_tokens} prompt tokens"
            yield f"{other.sampled_tokens} sampled"
        else:
            prompt = len(turn.prompt_ids) // TOKEN_BYTES
            yield f"{self._tree.contexts[index]} prompt tokens, {prompt} of them new"
            yield f"{sampled_tokens(turn)} sampled{_versions(turn)}"

    def _texts(self, index: int, full: bool) -> Iterator[Text]:
        recorded = self._turns[index].messages_json
        context: Mapping[str, Any] = json.loads(recorded) if recorded else {}
        messages = [*context.get("messages", ()), context.get("answer")]
        for message in messages:
            if message:
                yield _text(message, full)
        # Of an external API: texts in its protocol.
        for part in ("request", "response"):
            if part in context:
                yield _text({"role": part, "content": context[part]}, full)


def _text(message: Mapping[str, Any], full: bool) -> Text:
    role = message["role"]
    parts = [message.get("reasoning_content", ""), message.get("content") or ""]
    for call in message.get("tool_calls", ()):
        function = call["function"]
        parts.append(f"{function['name']}({json.dumps(function['arguments'])})")
    said = "\n".join(part for part in parts if part)
    if not full:
        said = " ".join(said.split())
        if len(said) > LINE_CHARACTERS:
            said = said[: LINE_CHARACTERS - 1] + "…"
    return Text.assemble((f"{role} ", _ROLE_STYLE.get(role, "")), said)


def _reward(reward: pb.RewardEvent) -> str:
    kind = REWARD_KINDS.get(reward.kind, f"kind {reward.kind}")
    return f"[green]{kind} {escape(reward.name)} = {reward.value:g}[/green]"


def _versions(turn: pb.Turn) -> str:
    versions: Sequence[int] = sorted(set(int32_array(turn.sampled.weight_versions).tolist()))
    if not versions:
        return ""
    return f" by weights {versions[0]}" + (f" to {versions[-1]}" if versions[1:] else "")


def _count(number: int, noun: str, several: str = "") -> str:
    return f"{number} {noun if number == 1 else several or noun + 's'}"
