"""The agent's SDK against a gateway on real sockets: one contract, kept by both clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import pytest
import pytest_asyncio
import trustme

from forge.client import AgentSession, Answer, Sampled, SessionInfo, SyncAgentSession, reward_event
from forge.core.errors import (
    ConfigError,
    FailedPrecondition,
    ForgeError,
    InvalidArgument,
    Unauthenticated,
)
from tests.support.agents.scripted_gateway import Message, ScriptedGateway, calls, replay, text

QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]


class InThreads:
    """A blocking session, each call in a thread, so that a test can drive both kinds alike."""

    def __init__(self, session: SyncAgentSession) -> None:
        self._session = session

    @classmethod
    def connect(cls, *arguments: Any, **options: Any) -> InThreads:
        return cls(SyncAgentSession.connect(*arguments, **options))

    @classmethod
    def from_env(cls, environ: dict[str, str]) -> InThreads:
        return cls(SyncAgentSession.from_env(environ))

    async def __aenter__(self) -> InThreads:
        await asyncio.to_thread(self._session.__enter__)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self._session.__exit__, kind, error, trace)

    async def open(self) -> SessionInfo:
        return await asyncio.to_thread(self._session.open)

    async def chat(self, messages: Any, **options: Any) -> Answer:
        return await asyncio.to_thread(self._session.chat, messages, **options)

    async def stream(self, messages: Any, **options: Any) -> AsyncGenerator[str | Answer, None]:
        pieces = self._session.stream(messages, **options)
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            await asyncio.to_thread(pieces.close)

    async def generate(self, prompt_ids: Any, **options: Any) -> Sampled:
        return await asyncio.to_thread(self._session.generate, prompt_ids, **options)

    async def annotate(self, *rewards: Any) -> None:
        await asyncio.to_thread(self._session.annotate, *rewards)

    async def close(self, *rewards: Any, **options: Any) -> int:
        return await asyncio.to_thread(self._session.close, *rewards, **options)


@pytest.fixture(params=[AgentSession, InThreads], ids=["asynchronous", "blocking"])
def client(request: pytest.FixtureRequest) -> Any:
    """Each of the two clients in turn."""
    return request.param


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with ScriptedGateway(replay(text("it is 4"))) as running:
        yield running


@pytest.fixture
def connected(client: Any, gateway: ScriptedGateway) -> Callable[..., Any]:
    """Makes a session that owns its rollout."""
    return lambda **options: client.connect(f"127.0.0.1:{gateway.grpc_port}", "token", **options)


def environment(gateway: ScriptedGateway) -> dict[str, str]:
    return {
        "FORGE_GRPC_ADDR": f"127.0.0.1:{gateway.grpc_port}",
        "FORGE_SESSION_TOKEN": "token",
    }


async def test_chat_returns_the_whole_answer(gateway: ScriptedGateway, connected: Any) -> None:
    """With the message to append and the counts of its turn."""
    async with connected() as session:
        answer = await session.chat(QUESTION, max_tokens=16)
    assert answer.text == "it is 4"
    assert answer.message == {"role": "assistant", "content": "it is 4"}
    assert (answer.finish_reason, answer.prompt_tokens, answer.turn_index) == ("stop", 7, 0)
    assert gateway.session("token").max_tokens == [16]


async def test_tool_calls_arrive_in_openai_shape(gateway: ScriptedGateway, connected: Any) -> None:
    """A white-box agent reads and sends back tool calls as an OpenAI client does."""
    gateway.script = replay(calls(("add", '{"a": 1}')), text("done"))
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    async with connected() as session:
        answer = await session.chat(QUESTION, tools=[tool])
        (call,) = answer.tool_calls
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "1"}
        await session.chat([*QUESTION, answer.message, result], tools=[tool])
    sent = gateway.session("token").requests[1]
    assert sent == [*QUESTION, answer.message, result]
    assert gateway.session("token").tools == [[tool], [tool]]


async def test_stream_yields_text_then_the_answer(gateway: ScriptedGateway, connected: Any) -> None:
    """Text in pieces; the last item is the whole answer."""
    async with connected() as session:
        pieces = [piece async for piece in session.stream(QUESTION)]
    assert pieces[:-1] == ["it", "is", "4"]
    assert isinstance(pieces[-1], Answer)
    assert pieces[-1].text == "it is 4"


async def test_generate_takes_and_returns_token_ids(
    gateway: ScriptedGateway, connected: Any
) -> None:
    """With log-prob and weight version, one entry per token."""
    async with connected() as session:
        sampled = await session.generate([5, 70_000, 2])
    assert list(sampled.ids) == [5, 70_000, 2]
    assert list(sampled.logprobs) == [-0.5] * 3
    assert list(sampled.weight_versions) == [5] * 3
    assert sampled.finish_reason == "length"


async def test_finish_reason_of_a_newer_gateway_arrives_by_its_number(
    gateway: ScriptedGateway, connected: Any
) -> None:
    """With the whole answer, which the agent may use."""
    gateway.finish_reason = 9
    async with connected() as session:
        answer = await session.chat(QUESTION)
        sampled = await session.generate([5])
    assert (answer.text, answer.finish_reason) == ("it is 4", "unknown_9")
    assert (list(sampled.ids), sampled.finish_reason) == ([5], "unknown_9")


async def test_normal_end_seals_the_trajectory(gateway: ScriptedGateway, connected: Any) -> None:
    """Leaving the block closes the session with its annotations."""
    async with connected() as session:
        await session.chat(QUESTION)
        await session.annotate(reward_event("solved", 1.0))
    assert gateway.session("token").state == "sealed"
    assert gateway.session("token").reward("solved") == 1.0


async def test_exception_abandons_the_trajectory(gateway: ScriptedGateway, connected: Any) -> None:
    """An unfinished trajectory is never trained; the record has the reason."""
    with pytest.raises(ZeroDivisionError):
        async with connected():
            raise ZeroDivisionError("by zero")
    session = gateway.session("token")
    assert (session.state, session.reason) == ("abandoned", "ZeroDivisionError: by zero")


async def test_session_from_the_environment_is_closed_by_its_runner(
    gateway: ScriptedGateway, client: Any
) -> None:
    """A program of a runner neither seals nor abandons: the runner scores it first."""
    async with client.from_env(environment(gateway)) as session:
        await session.chat(QUESTION)
    assert gateway.session("token").state == "open"


def test_missing_variable_is_named(client: Any) -> None:
    """The error says that a runner sets it."""
    with pytest.raises(ConfigError, match=r"FORGE_SESSION_TOKEN .*forge agents run"):
        client.from_env({"FORGE_GRPC_ADDR": "127.0.0.1:1"})


async def test_busy_gateway_is_retried(gateway: ScriptedGateway, connected: Any) -> None:
    """Overload and restarts, by the classes of the error tree."""
    gateway.failures += [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls wait"),
        (grpc.StatusCode.UNAVAILABLE, "draining"),
    ]
    async with connected() as session:
        assert (await session.chat(QUESTION)).text == "it is 4"
    assert len(gateway.session("token").requests) == 1


async def test_wrong_token_is_not_retried(gateway: ScriptedGateway, connected: Any) -> None:
    """A permanent error is raised at once, as its own type."""
    gateway.failures += [(grpc.StatusCode.UNAUTHENTICATED, "expired")] * 2
    with pytest.raises(Unauthenticated, match="expired"):
        await connected().open()
    assert len(gateway.failures) == 1


async def test_session_with_missing_turns_is_not_sealed(
    gateway: ScriptedGateway, connected: Any
) -> None:
    """Answered turns that were not recorded must not be sealed away."""
    async with connected() as session:
        await session.chat(QUESTION)
        with pytest.raises(FailedPrecondition, match="only 1 turns"):
            await session.close(min_turns=2)


async def test_content_part_that_is_no_text_is_refused(
    gateway: ScriptedGateway, connected: Any
) -> None:
    """Parts of text are joined; any other part is named by its type."""
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}
    async with connected() as session:
        with pytest.raises(InvalidArgument, match="image_url"):
            await session.chat([image])
        await session.chat([parts])
    assert gateway.session("token").requests == [[{"role": "user", "content": "ab"}]]


async def test_calls_of_sub_agents_run_in_parallel(
    gateway: ScriptedGateway, connected: Any
) -> None:
    """One session has any number of running calls; none waits for another's answer."""
    meeting = asyncio.Barrier(3)

    async def meet(token: str, messages: list[Message]) -> Message:
        await meeting.wait()
        return text(messages[0]["content"])

    gateway.script = meet
    async with connected() as session:
        asked = [session.chat([{"role": "user", "content": name}]) for name in ("a", "b", "c")]
        assert [answer.text for answer in await asyncio.gather(*asked)] == ["a", "b", "c"]


async def test_closed_stream_aborts_its_turn(gateway: ScriptedGateway, connected: Any) -> None:
    """The gateway samples no further."""
    gateway.hold_after_first_word = True
    async with connected() as session:
        async with aclosing(session.stream(QUESTION)) as pieces:
            assert await anext(pieces) == "it"
        await gateway.aborted.wait()


async def test_misspelled_option_is_named(connected: Any) -> None:
    """It is an error of the caller, not ignored."""
    async with connected() as session:
        with pytest.raises(TypeError, match="max_token"):
            await session.chat(QUESTION, max_token=5)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An authority, its server's credentials and a client's files."""
    folder = tmp_path_factory.mktemp("tls")
    ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
    server, client = ca.issue_cert("127.0.0.1"), ca.issue_cert("agent-0")
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    client.private_key_pem.write_to_path(str(folder / "key.pem"))
    chain = b"".join(blob.bytes() for blob in client.cert_chain_pems)
    (folder / "cert.pem").write_bytes(chain)
    credentials = grpc.ssl_server_credentials(
        [
            (
                server.private_key_pem.bytes(),
                b"".join(blob.bytes() for blob in server.cert_chain_pems),
            )
        ],
        root_certificates=ca.cert_pem.bytes(),
        require_client_auth=True,
    )
    return {"credentials": credentials, "folder": folder}


async def test_client_certificate_is_accepted_by_a_gateway_with_mutual_tls(
    client: Any, authority: dict[str, Any]
) -> None:
    """Mutual TLS from the environment: with the certificate a turn, without it an error."""
    folder: Path = authority["folder"]
    trusting = {"FORGE_TLS_CA": str(folder / "ca.pem")}
    certified = {
        "FORGE_TLS_CERT": str(folder / "cert.pem"),
        "FORGE_TLS_KEY": str(folder / "key.pem"),
    }
    credentials = authority["credentials"]
    async with ScriptedGateway(replay(text("4")), credentials=credentials) as gateway:
        reach = environment(gateway) | trusting
        async with client.from_env(reach | certified) as session:
            assert (await session.chat(QUESTION)).text == "4"
        stranger = client.connect(
            reach["FORGE_GRPC_ADDR"], "token", tls_ca=reach["FORGE_TLS_CA"], retry_for_s=0.0
        )
        with pytest.raises(ForgeError):
            async with stranger:
                pass


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tls_cert": "c"}, "tls_cert and tls_key must be set together"),
        ({"tls_cert": "c", "tls_key": "k"}, "tls_ca is not"),
        ({"tls_ca": "no-such.pem"}, "tls_ca = 'no-such.pem': No such file"),
    ],
)
def test_mismatched_tls_files_are_named(client: Any, files: dict[str, str], said: str) -> None:
    """Before any call."""
    with pytest.raises(ConfigError, match=said):
        client.connect("127.0.0.1:1", "token", **files)
