"""A Chat's messages over gRPC are recognized by what they begin with, as those of JSON are."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import InvalidArgument
from forge.v1 import gateway_pb2
from services.gateway.conversation import chat_history
from services.gateway.conversation.chat_history import ChatHistory

ROLES = ("system", "user", "assistant", "tool")
messages = st.lists(
    st.builds(
        gateway_pb2.ChatMessage,
        role=st.sampled_from(ROLES),
        # Zero and newline are what tags and lengths of the encoding look like.
        content=st.text(st.sampled_from("a\0\n\x01\x02日"), max_size=6),
        reasoning=st.sampled_from(("", "so")),
        tool_call_id=st.sampled_from(("", "call-1")),
        tool_calls=st.lists(
            st.builds(gateway_pb2.ToolCall, id=st.just("call-1"), name=st.just("look")),
            max_size=2,
        ),
    ),
    min_size=1,
    max_size=5,
)


@given(messages, messages)
def test_known_beginning_of_a_request_is_not_decoded_again(old: list[Any], new: list[Any]) -> None:
    """A longer request is recognized by a shorter one's mark, and only what follows is decoded."""
    mark = ChatHistory(old).mark()
    later = ChatHistory([*old, *new])
    assert later.known([mark]) == mark
    expected = ChatHistory(new)[:]
    with patch.object(chat_history, "_message", wraps=chat_history._message) as decoded:
        assert later.behind(mark) == expected
    places = [call.args[1] for call in decoded.call_args_list]
    assert places == list(range(len(old), len(old) + len(new)))
    assert len(later) == len(old) + len(new)
    assert later[:] == [*ChatHistory(old), *ChatHistory(new)]


@given(messages, messages)
def test_mark_is_recognized_only_with_the_same_messages(old: list[Any], new: list[Any]) -> None:
    """A mark is recognized exactly where the request begins with its messages."""
    mark = ChatHistory(old).mark()
    assert (ChatHistory(new).known([mark]) == mark) == (new[: len(old)] == old)


def test_unknown_role_is_named_by_its_message_number() -> None:
    """The number in the whole request, wherever decoding begins."""
    known = [gateway_pb2.ChatMessage(role="user", content="hello")]
    wrong = gateway_pb2.ChatMessage(role="oracle")
    mark = ChatHistory(known).mark()
    with pytest.raises(InvalidArgument, match=r"messages\[1\]: .*oracle"):
        ChatHistory([*known, wrong]).behind(mark)
    with pytest.raises(InvalidArgument, match=r"messages\[0\]: .*oracle"):
        ChatHistory([wrong])[:]
