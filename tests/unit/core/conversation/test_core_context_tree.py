"""Matching requests to the tree of contexts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forge.core.conversation.context_tree import ContextTree, Node, common_depth
from forge.core.conversation.messages import Message, ToolCall


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(text: str, reasoning: str = "") -> Message:
    return Message(role="assistant", content=text, reasoning=reasoning)


def called(call_id: str) -> Message:
    call = ToolCall(name="look", arguments="{}", call_id=call_id)
    return Message(role="assistant", tool_calls=(call,))


def test_deepest_agreeing_node_is_found() -> None:
    """A request matches the deepest node whose messages agree, also behind the last turn."""
    tree = ContextTree()
    root = tree.root("[]")
    first = tree.answer(tree.extend(root, [user("a")]), said("b"), turn=0)
    second = tree.answer(tree.extend(first, [user("c")]), said("d"), turn=1)
    assert tree.match(root, [user("a"), said("b"), user("c"), said("d"), user("e")]) is second
    assert tree.match(root, [user("a"), said("b"), user("other")]) is first
    assert tree.match(root, [user("other")]) is root
    assert tree.match(root, []) is root


def test_different_tools_are_different_trees() -> None:
    """Tools are part of every prompt, so requests with different tools share no node."""
    tree = ContextTree()
    node = tree.extend(tree.root("[]"), [user("a")])
    assert tree.match(tree.root("[1]"), [user("a")]) is not node
    assert common_depth(node, tree.extend(tree.root("[1]"), [user("a")])) == 0


def test_match_prefers_the_answer_whose_continuation_agrees() -> None:
    """Of two equal answers the older one is matched if only its continuation agrees."""
    tree = ContextTree()
    asked = tree.extend(tree.root("[]"), [user("a")])
    old = tree.answer(asked, said("b"), turn=0)
    tree.answer(asked, said("b"), turn=1)
    onward = tree.extend(old, [user("c")])
    assert tree.match(tree.root("[]"), [user("a"), said("b"), user("c")]) is onward


def test_call_ids_decide_between_equal_calls() -> None:
    """Ids do not matter for agreement, but they break ties; then the last turn wins."""
    tree = ContextTree()
    root = tree.root("[]")
    asked = tree.extend(root, [user("a")])
    first = tree.answer(asked, called("x"), turn=0)
    second = tree.answer(asked, called("y"), turn=1)
    assert tree.match(root, [user("a"), called("x")]) is first
    assert tree.match(root, [user("a"), called("y")]) is second
    assert tree.match(root, [user("a"), called("z")]) is second


def test_sent_reasoning_selects_among_equal_answers() -> None:
    """Answers that differ in reasoning only are distinguished by the reasoning of the request."""
    tree = ContextTree()
    root = tree.root("[]")
    asked = tree.extend(root, [user("a")])
    first = tree.answer(asked, said("b", "hm"), turn=0)
    second = tree.answer(asked, said("b", "ho"), turn=1)
    assert tree.match(root, [user("a"), said("b", "hm")]) is first
    assert tree.match(root, [user("a"), said("b")]) is second
    assert tree.match(root, [user("a"), said("b", "ha")]) is asked


def test_first_prompt_of_a_boundary_is_remembered() -> None:
    """A later sample from the same messages finds the turn whose prompt to repeat."""
    tree = ContextTree()
    asked = tree.extend(tree.root("[]"), [user("a")])
    tree.answer(asked, said("forced"), turn=0, opening="{")
    assert asked.prompted == -1
    tree.answer(asked, said("b"), turn=1)
    tree.answer(asked, said("c"), turn=2)
    assert asked.prompted == 1


paths = st.lists(st.lists(st.sampled_from("abc"), max_size=5), min_size=1, max_size=12)


@given(paths, st.lists(st.sampled_from("abc"), max_size=6))
def test_match_is_the_longest_common_prefix(known: list[list[str]], asked: list[str]) -> None:
    """The match is as deep as the longest common prefix with any path."""
    tree = ContextTree()
    root = tree.root("[]")
    for path in known:
        tree.extend(root, [user(text) for text in path])
    node = tree.match(root, [user(text) for text in asked])
    assert node.depth == max(_agreement(path, asked) for path in known)
    assert [entry.message.content for entry in node.path() if entry.message] == asked[: node.depth]


@given(paths)
def test_common_depth_of_two_nodes_is_the_depth_of_their_branch(known: list[list[str]]) -> None:
    """Two nodes share the messages that their paths share."""
    tree = ContextTree()
    nodes: list[Node] = [
        tree.extend(tree.root("[]"), [user(text) for text in path]) for path in known
    ]
    for left, one in zip(nodes, known, strict=True):
        for right, other in zip(nodes, known, strict=True):
            assert common_depth(left, right) == _agreement(one, other)


def _agreement(left: list[str], right: list[str]) -> int:
    agreed = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        agreed += 1
    return agreed
