"""What the edge accepts, what it says when it does not, and what travels."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import (
    ConfigError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
)
from forge.runtime.rpc import tensors
from forge.runtime.rpc.chunks import CHUNK_BYTES
from forge.runtime.rpc.tokens import joined, split
from forge.v1.common_pb2 import Grammar, SampledTokens, SamplingParams
from forge.v1.inference_pb2 import FetchKvRequest, FetchKvResponse, SampleRequest
from services.inference import codec, kv_codec
from services.inference.engines.base import Finish, KvSpan, ModelLimits, Tokens
from services.inference.engines.model_limits import read_limits

LIMITS = ModelLimits(context_tokens=8, vocabulary=10)


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


@pytest.mark.parametrize(
    ("prompt_ids", "sampling", "words"),
    [
        (b"", {}, ("prompt_ids", "empty")),
        (b"\0\0\0", {}, ("prompt_ids", "3 bytes")),
        (ids(*[1] * 8), {}, ("8 tokens", "context of 8", "at most 7")),
        (ids(10), {}, ("token 10", "0 to 9")),
        (ids(-1), {}, ("token -1", "0 to 9")),
        (ids(9, 0, 12, 10), {}, ("token 12", "0 to 9")),
        (ids(9, 2**31 - 1, -(2**31)), {}, (f"token {-(2**31)}", "0 to 9")),
        (ids(1), {"max_tokens": 0}, ("sampling.max_tokens = 0",)),
        (ids(1), {"top_p": 0.0}, ("sampling.top_p = 0",)),
        (ids(1), {"top_p": 1.5}, ("sampling.top_p = 1.5",)),
        (ids(1), {"top_p": float("nan")}, ("sampling.top_p = nan",)),
        (ids(1), {"temperature": -0.5}, ("sampling.temperature = -0.5",)),
        (ids(1), {"temperature": float("inf")}, ("sampling.temperature = inf",)),
        (ids(1), {"grammar": Grammar()}, ("sampling.grammar", "json_schema, regex or lark")),
        (ids(1), {"grammar": Grammar(regex="a")}, ("sampling.grammar", "stop_token_ids")),
        (ids(1), {"min_tokens": 5}, ("min_tokens = 5", "max_tokens = 4")),
        (ids(1), {"min_p": 1.5}, ("sampling.min_p = 1.5", "from 0 to 1")),
        (ids(1), {"presence_penalty": -3}, ("sampling.presence_penalty = -3",)),
        (ids(1), {"frequency_penalty": float("nan")}, ("sampling.frequency_penalty = nan",)),
        (ids(1), {"repetition_penalty": 0}, ("repetition_penalty = 0", "from 9.53674e-07 to 10")),
        (
            ids(1),
            {"repetition_penalty": 1e-40},
            ("repetition_penalty = ", "from 9.53674e-07 to 10"),
        ),
        (ids(1), {"logit_bias": {10: 1.0}}, ("logit_bias has token 10", "0 to 9")),
        (ids(1), {"logit_bias": {1: 200.0}}, ("sampling.logit_bias[1] = 200", "-100 to 100")),
        (ids(1), {"answered_tokens": 2}, ("answered_tokens = 2", "1 tokens")),
        (
            ids(1),
            {"grammar": Grammar(regex="a", matched_tokens=2), "stop_token_ids": [3]},
            ("matched_tokens = 2", "1 tokens"),
        ),
    ],
)
def test_invalid_input_is_named_with_its_value(
    prompt_ids: bytes, sampling: dict[str, Any], words: tuple[str, ...]
) -> None:
    """InvalidArgument gives field, value and allowed values."""
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    request = SampleRequest(request_id="r", prompt_ids=prompt_ids, sampling=params)
    with pytest.raises(InvalidArgument) as refused:
        codec.read_prompt(request, LIMITS, seed=0)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize("kind", ["json_schema", "regex", "lark"])
def test_grammar_reaches_the_worker_whole(kind: str) -> None:
    """With the number of matched tokens; a request without a grammar stays without."""
    params = SamplingParams(max_tokens=4, temperature=1, top_p=1, seed=5, stop_token_ids=[3])
    assert codec.read_sampling(params, seed=0).grammar is None
    assert codec.sampling_of_rest(params, seed=5, max_tokens=4, sampled_tokens=2) == params
    params.grammar.lenient = True
    params.grammar.matched_tokens = 7
    setattr(params.grammar, kind, "{}")
    rest = codec.sampling_of_rest(params, seed=5, max_tokens=4, sampled_tokens=2)
    assert rest.grammar.matched_tokens == 9
    rest.grammar.matched_tokens = 7
    assert rest == params


def test_unset_sampling_is_the_trained_distribution() -> None:
    """Temperature and top-p 1, every token allowed, and the seed given by the caller of read, else
    a random one."""
    unset = SamplingParams(max_tokens=4)
    assert len({codec.read_sampling(unset).seed for _ in range(8)}) == 8
    sampling = codec.read_sampling(unset, seed=99)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.seed == 99


def test_sampling_parameters_reach_the_worker() -> None:
    """Every field, also zero temperature and a 64-bit seed."""
    params = SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        max_tokens=9,
        stop_token_ids=[4, 2],
        seed=2**64 - 1,
        top_logprobs=20,
        min_tokens=6,
        min_p=0.25,
        presence_penalty=2.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias={7: -100.0, 3: 1.5},
    )
    sampling = codec.read_sampling(params, seed=0)
    rest = codec.sampling_of_rest(params, seed=sampling.seed, max_tokens=9, sampled_tokens=0)
    assert codec.read_sampling(rest, seed=0) == sampling
    assert sampling.seed == 2**64 - 1


@pytest.mark.parametrize(("sampled", "room", "least"), [(2, 7, 4), (6, 3, 0), (0, 5, 5)])
def test_a_continued_answer_needs_the_rest_of_its_least_length(
    sampled: int, room: int, least: int
) -> None:
    """And no more than it has room for."""
    params = SamplingParams(max_tokens=9, min_tokens=6)
    rest = codec.sampling_of_rest(params, seed=1, max_tokens=room, sampled_tokens=sampled)
    assert rest.min_tokens == least


def test_finish_reason_of_a_newer_worker_is_named_by_its_number() -> None:
    """Another worker continues the answer; those of this release are read back."""
    for finish in (*Finish, None):
        assert codec.read_finish(codec.write_finish(finish)) is finish
    newer: Any = 9
    with pytest.raises(Unavailable, match="FINISH_REASON_UNKNOWN_9, which this router"):
        codec.read_finish(newer)


def test_sampled_tokens_are_read_back() -> None:
    """Columns are equal, and parts join in order."""
    tokens = Tokens(ids=(3, 1), logprobs=(-0.5, -0.25), versions=(7, 8))
    message = codec.write_tokens(tokens)
    assert codec.read_tokens(message) == tokens
    doubled = codec.read_tokens(joined([message, message]))
    assert doubled.ids == (3, 1, 3, 1)


@given(count=st.integers(0, 50), top=st.integers(0, 3), max_bytes=st.integers(1, 500))
def test_split_tokens_are_joined_again(count: int, top: int, max_bytes: int) -> None:
    """No token is lost, doubled or separated from its columns, and each message is within its
    limit, or has one token."""
    tokens = Tokens(
        ids=tuple(range(count)),
        logprobs=tuple(-0.5 * at for at in range(count)),
        versions=(7,) * count,
        top=tuple(((at, -1.0),) * top for at in range(count)) if top else (),
    )
    parts = list(split(codec.write_tokens(tokens), max_bytes=max_bytes))
    assert codec.read_tokens(joined(parts)) == tokens
    for part in parts:
        columns = sum(len(value) for _, value in part.ListFields())
        assert columns <= max_bytes or len(part.ids) == 4


def test_top_logprobs_are_read_back() -> None:
    """As many for each token as before, also joined; wrong columns are refused."""
    top = (((3, -0.5), (1, -1.0)), ((9, -0.25), (2, -math.inf)))
    tokens = Tokens(ids=(3, 1), logprobs=(-0.5, -0.25), versions=(7, 8), top=top)
    message = codec.write_tokens(tokens)
    assert codec.read_tokens(message) == tokens
    assert codec.read_tokens(joined([message, message])).top == (*top, *top)
    message.top_logprobs = message.top_logprobs[:-4]
    with pytest.raises(InvalidArgument, match="likeliest"):
        codec.read_tokens(message)
    with pytest.raises(InvalidArgument, match="top_logprobs = 21"):
        codec.read_sampling(SamplingParams(max_tokens=1, top_logprobs=21), seed=0)


def test_columns_of_different_length_are_refused() -> None:
    """A token without its log-prob is refused."""
    with pytest.raises(InvalidArgument, match="disagree"):
        codec.read_tokens(SampledTokens(ids=ids(1, 2), logprobs=b"\0" * 4, weight_versions=ids(1)))


@pytest.mark.parametrize("slices", [True, False])
def test_kv_spans_are_read_back(slices: bool) -> None:
    """A span of several messages is whole, in slices and in chunks."""
    data = bytes(range(256)) * (CHUNK_BYTES // 128)
    span = KvSpan(
        from_token=3,
        tokens=2,
        version=5,
        dtype="uint8",
        shape=(1, 2, 1, 2, len(data) // 4),
        data=data,
    )
    assembler = kv_codec.SpanAssembler()
    responses = list(kv_codec.write_span(span, slices=slices))
    assert len(responses) > 1
    assert all(response.HasField("slice") == slices for response in responses)
    assert [one for one in map(assembler.add, responses) if one is not None] == [span]


def test_last_state_travels_with_the_last_slice() -> None:
    """With a checksum; a damaged one is refused, and an earlier release sends none."""
    data = bytes(CHUNK_BYTES + 8)
    span = KvSpan(
        from_token=0, tokens=1, version=1, dtype="uint8", shape=(len(data),), data=data,
        last_state=b"state",
    )  # fmt: skip
    first, last = kv_codec.write_span(span, slices=True)
    assert not first.last_state
    assembler = kv_codec.SpanAssembler()
    assert [assembler.add(first), assembler.add(last)] == [None, span]
    damaged, bare = FetchKvResponse(), FetchKvResponse()
    damaged.CopyFrom(last)
    damaged.last_state = b"State"
    assembler.add(first)
    with pytest.raises(DataLoss, match="last_state is damaged"):
        assembler.add(damaged)
    bare.CopyFrom(last)
    bare.ClearField("last_state")
    bare.ClearField("last_state_xxh3_64")
    assembler = kv_codec.SpanAssembler()
    assembler.add(first)
    assert assembler.add(bare) == replace(span, last_state=b"")


def test_recurrent_states_travel_before_the_span_that_ends_a_prompt() -> None:
    """In slices with checksums, and with that span alone; without slices they are refused. Experts
    likewise, for a caller that takes them."""
    states = bytes(range(256)) * (CHUNK_BYTES // 128)
    span = KvSpan(
        from_token=0, tokens=1, version=1, dtype="uint8", shape=(8,), data=bytes(8),
        recurrent=states, routes=b"\1\2",
    )  # fmt: skip
    asked = FetchKvRequest(slices=True, experts=True)
    end = list(kv_codec.write_prompt_end(span, asked))
    sent = [*end, *kv_codec.write_span(span, slices=True)]
    assert len(sent) == 4
    assembler = kv_codec.SpanAssembler()
    assert [assembler.add(response) for response in sent] == [None, None, None, span]
    assert assembler.add(sent[-1]) == replace(span, recurrent=b"", routes=b"")
    assert list(kv_codec.write_prompt_end(span, FetchKvRequest(slices=True))) == end[:2]
    sent[0].slice.data = b"s" + sent[0].slice.data[1:]
    with pytest.raises(DataLoss, match=r"recurrent: .* damaged"):
        assembler.add(sent[0])
    with pytest.raises(FailedPrecondition, match="set `slices`"):
        list(kv_codec.write_prompt_end(span, FetchKvRequest()))


def test_span_larger_than_a_message_needs_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without slices the refusal names the size and the field to set."""
    monkeypatch.setattr(tensors, "MAX_SERIALIZED_BYTES", 7)
    span = KvSpan(from_token=0, tokens=1, version=1, dtype="uint8", shape=(8,), data=bytes(8))
    assert len(list(kv_codec.write_span(span, slices=True))) == 1
    with pytest.raises(FailedPrecondition, match="kv has 8 bytes, a message holds 7: set `slices`"):
        list(kv_codec.write_span(span, slices=False))


def test_context_limit_comes_from_the_models_config(tmp_path: Path) -> None:
    """Unless a shorter one is set; a text_config takes precedence."""
    config = {"vocab_size": 50, "text_config": {"max_position_embeddings": 64, "vocab_size": 60}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_limits(str(tmp_path), context_tokens=0) == ModelLimits(
        context_tokens=64, vocabulary=60
    )
    assert read_limits(str(tmp_path), context_tokens=32).context_tokens == 32
    assert read_limits(str(tmp_path), context_tokens=128).context_tokens == 64


@pytest.mark.parametrize("content", [None, "{", "{}", '{"vocab_size": 5}'])
def test_model_folder_without_a_usable_config_is_an_error(
    tmp_path: Path, content: str | None
) -> None:
    """ConfigError names model_path and the fault."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="model_path"):
        read_limits(str(tmp_path), context_tokens=0)


def test_router_imports_no_torch() -> None:
    """Its host has none installed."""
    code = (
        "import sys, services.inference.app, services.inference.router.role;"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
