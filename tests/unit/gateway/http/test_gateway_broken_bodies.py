"""Bodies that a client spoilt: half characters are repaired, broken compression is refused."""

from __future__ import annotations

import gzip
import json
from typing import Any

import aiohttp
import pytest
from aiohttp.compression_utils import HAS_BROTLI, HAS_ZSTD
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from services.gateway.http.request_fields.request_body import without_lone_surrogates
from tests.support.gateway.scripted_turns import ScriptedTurns, served

pieces = st.sampled_from(["\ud83d", "\ude00", "\U0001f600", "\\", '"', "u", "ud83d", "a", "\n"])
ASK = b'{"model": "chatml-test", "messages": [{"role": "user", "content": "hi"}]}'


def replaced(text: str) -> str:
    """The text with U+FFFD for each lone surrogate, as a JSON reader would have it."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@given(st.lists(pieces).map("".join))
@example("\\ud83d")
@example("\ud83d\ud83d\ude00")
def test_only_lone_surrogates_are_replaced(text: str) -> None:
    """Beside pairs, backslashes, and texts that look like an escape."""
    body = without_lone_surrogates(json.dumps({"a": text}).encode())
    assert json.loads(body) == {"a": replaced(text)}


def test_each_replacement_is_counted() -> None:
    """A metric shows how often agents cut characters."""
    name = "forge_gateway_replaced_surrogates_total"
    before = REGISTRY.get_sample_value(name) or 0.0
    without_lone_surrogates(rb'["\ud83d", "\uDE00", "\ud83d\ude00", "\\ud83d"]')
    assert (REGISTRY.get_sample_value(name) or 0.0) - before == 2


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b"not gzip"),
        ("gzip", gzip.compress(ASK, mtime=0)[:-12]),
        ("deflate", b"xx"),
    ],
)
async def test_a_body_that_cannot_be_decompressed_is_refused(encoding: str, body: bytes) -> None:
    """Status 400, not an internal error; the next request on a new connection is answered."""
    headers = {"Authorization": "Bearer k", "Content-Encoding": encoding}
    async with served(ScriptedTurns()) as url:
        path = f"{url}/v1/chat/completions"
        async with (
            aiohttp.ClientSession() as http,
            http.post(path, data=body, headers=headers) as answer,
        ):
            assert answer.status == 400, await answer.text()
        headers["Content-Encoding"] = "gzip"
        async with (
            aiohttp.ClientSession() as http,
            http.post(path, data=gzip.compress(ASK), headers=headers) as answer,
        ):
            assert answer.status == 200, await answer.text()


@pytest.mark.parametrize("encoding", ["lz4", "gzip, gzip", "aws-chunked", "\xe9"])
@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/chat/completions", {"type": "invalid_request_error", "code": "unsupported_encoding"}),
        ("/v1/responses", {"type": "invalid_request_error", "code": "unsupported_encoding"}),
        ("/v1/messages", {"type": "invalid_request_error"}),
        ("/v1beta/models/chatml-test:generateContent", {"code": 415, "status": "INVALID_ARGUMENT"}),
    ],
)
async def test_an_encoding_that_cannot_be_read_is_refused(
    path: str, shape: dict[str, Any], encoding: str
) -> None:
    """With the encodings that can, in the shape of the protocol: read as it is, such a body would
    pass for broken JSON."""
    headers = {"Authorization": "Bearer k", "Content-Encoding": encoding}
    async with (
        served(ScriptedTurns()) as url,
        aiohttp.ClientSession() as http,
        http.post(url + path, data=ASK, headers=headers) as answer,
    ):
        error = (await answer.json())["error"]
        assert answer.status == 415
        assert "gzip" in answer.headers["Accept-Encoding"]
    assert error.items() >= shape.items()
    assert encoding.encode("ascii", "ignore").decode() in error["message"]


@pytest.mark.parametrize(
    ("encoding", "readable"), [("br", HAS_BROTLI), ("zstd", HAS_ZSTD)], ids=["br", "zstd"]
)
async def test_an_encoding_without_its_library_is_refused(encoding: str, readable: bool) -> None:
    """As JSON, with its name and the encodings that this host reads."""
    headers = {"Authorization": "Bearer k", "Content-Encoding": encoding}
    async with (
        served(ScriptedTurns()) as url,
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", data=b"xx", headers=headers) as answer,
    ):
        error = (await answer.json())["error"]
        assert answer.status == (400 if readable else 415)
        assert encoding in error["message"]
        assert readable or "gzip" in answer.headers["Accept-Encoding"]


@pytest.mark.parametrize("encoding", ["", "identity", "Identity", "GZIP"])
async def test_encodings_are_compared_without_case(encoding: str) -> None:
    """`identity` is no encoding."""
    headers = {"Authorization": "Bearer k", "Content-Encoding": encoding}
    body = gzip.compress(ASK) if encoding == "GZIP" else ASK
    async with (
        served(ScriptedTurns()) as url,
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", data=body, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
