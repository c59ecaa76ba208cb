"""What is read from the answer of an external API as it passes."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from forge.v1 import common_pb2
from services.gateway.external.answer import MAX_LINE_BYTES, ExternalAnswer, called_turn

CHAT = (
    b'data: {"choices":[{"delta":{"content":"[DONE]"}}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":3}}\n\n'
    b"data: [DONE]\n\n"
)
ANTHROPIC = (
    b'event: message_start\ndata: {"message":{"usage":{"input_tokens":11,"output_tokens":1}}}\n\n'
    b'event: message_delta\ndata: {"usage":{"output_tokens":3}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
RESPONSES = (
    b'event: response.created\ndata: {"response":{"usage":null}}\n\n'
    b"event: response.completed\n"
    b'data: {"response":{"usage":{"input_tokens":11,"output_tokens":3}}}\n\n'
)


def read(answer: ExternalAnswer, stream: bytes, *cuts: int) -> list[bytes]:
    """Adds the stream in pieces; returns it with a line before its last event, if that is seen."""
    out = []
    for first, last in pairwise([0, *sorted(cuts), len(stream)]):
        piece = stream[first:last]
        at = answer.add(piece)
        out.append(piece if at is None else piece[:at] + b": turn\n" + piece[at:])
    return out


@given(
    stream=st.sampled_from([CHAT, ANTHROPIC, RESPONSES]),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_usage_and_last_event_are_found_however_the_stream_is_cut(
    stream: bytes, cuts: list[int]
) -> None:
    """Inserted lines stand before a line of the stream, never inside one."""
    answer = ExternalAnswer(streamed=True, recorded_bytes=1 << 16)
    out = b"".join(read(answer, stream, *(cut for cut in cuts if cut <= len(stream))))
    assert (answer.prompt_tokens, answer.sampled_tokens, answer.ended) == (11, 3, True)
    assert answer.text() == (stream.decode(), 0)
    lines = out.split(b"\n")
    assert lines.count(b": turn") <= 1
    assert b"\n".join(line for line in lines if line != b": turn") == stream


def test_stream_without_its_last_event_has_not_ended() -> None:
    """Words of the answer do not end it."""
    answer = ExternalAnswer(streamed=True, recorded_bytes=10)
    read(answer, CHAT[: CHAT.rindex(b"data: ")])
    assert not answer.ended
    text, omitted = answer.text()
    assert (len(text), omitted > 0) == (10, True)


@given(st.lists(st.binary(max_size=64), max_size=16))
def test_any_bytes_are_read(pieces: list[bytes]) -> None:
    """An API may send what it likes."""
    for streamed in (True, False):
        answer = ExternalAnswer(streamed=streamed, recorded_bytes=64)
        for piece in pieces:
            answer.add(piece)
        answer.read_usage(b"".join(pieces))
        assert len(answer.text()[0].encode()) <= 3 * 64


def test_endless_line_is_not_kept() -> None:
    """The memory of a call is bounded by its settings."""
    answer = ExternalAnswer(streamed=True, recorded_bytes=0)
    for _ in range(40):
        answer.add(b"x" * (1 << 16))
    assert len(answer._line) <= MAX_LINE_BYTES + 1
    assert answer.text() == ("", 40 << 16)


def test_absurd_usage_is_bounded() -> None:
    """The record has 32 bits for it."""
    answer = ExternalAnswer(streamed=False, recorded_bytes=64)
    answer.read_usage(b'{"usage": {"prompt_tokens": -5, "completion_tokens": 99999999999}}')
    turn = called_turn("m", "external", b"{}", answer, recorded_bytes=64, whole=True)
    assert (turn.other_model.prompt_tokens, turn.other_model.sampled_tokens) == (0, 2**32 - 1)


def test_record_keeps_the_end_of_a_request_and_the_beginning_of_an_answer() -> None:
    """The newest messages stand at the end; vectors are not kept."""
    answer = ExternalAnswer(streamed=False, recorded_bytes=4)
    answer.add(b"abcdefgh")
    turn = called_turn("m", "external", b"12345678", answer, recorded_bytes=4, whole=False)
    assert json.loads(turn.messages_json) == {
        "request": "5678",
        "omitted_request_bytes": 4,
        "response": "abcd",
        "omitted_response_bytes": 4,
    }
    assert turn.finish_reason == common_pb2.FINISH_REASON_ABORTED
    vectors = called_turn("m", "embeddings", b"12", answer, recorded_bytes=4, whole=True)
    assert json.loads(vectors.messages_json) == {"request": "12"}
