"""A stand-in for inference: a process that registers as a router and samples scripted text.

The prompt itself is the script. Of each of these the last occurrence counts:

    SAY[[text]]    what to answer, and then the end-of-turn token; "ok" without it
    STEPS[[a|||b]] what to answer, by the number of answers that the prompt has already: for agents
                   that put their tools' results into words of their own; SAY goes before it
    FOLD[[text]]   what to answer to a user's message with "summary", "snapshot" or the like, in a
                   prompt that does not have the text yet: an agent folds its history.
                   LATER((a;;;b)) in it is said as STEPS[[a|||b]], for the new history
    PACE[[0.05]]   seconds after each token, when streaming; 0.005 without it, since tokens that
                   come at once go out at once
    FAIL[[name]]   the engine of that name dies (SIGKILL) in mid-answer, after three tokens

A text is sampled one character at a time. That is hardly ever how its tokenizer would encode it,
so whoever re-tokenizes an answer is found out. Log-probs are -1/2, -1/3, -1/4, ...; the weight
version is the setting. Every request is logged as a JSON line with prompt and sampled ids.

    python -m tests.support.gateway.scripted_engine --model-path DIR --requests-file FILE ...
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.core.conversation.messages import Message
from forge.core.token_columns import float32_bytes, int32_array, int32_bytes
from forge.runtime.process.service import ServiceContext
from forge.runtime.process.startup import run
from forge.runtime.serving_groups import kind_in
from forge.runtime.settings import ServiceConfig
from forge.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from services.gateway.model.chat_model import ChatModel
from services.inference.router.sample_stream import SampleStreams
from tests.support.runtime.service_process import ServiceProcess, start_service

FULL_NAME = "forge.v1.InferenceService"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedEngineConfig(ServiceConfig):
    """A router that says what the prompt tells it to."""

    model_path: str = ""
    """Where the tokenizer is."""
    requests_file: str = ""
    """File to append a JSON line per request to; empty: none."""
    weight_version: int = 7
    """Version that all tokens carry."""
    serving_group: str = ""
    """As of the inference service."""


class ScriptedEngine(inference_pb2_grpc.InferenceServiceServicer):
    """Samples by script."""

    def __init__(
        self, model: ChatModel, *, name: str, weight_version: int, requests_file: str
    ) -> None:
        self._model = model
        self._name = name
        self._weight_version = weight_version
        self._requests_file = requests_file
        self._answer_begins = _answer_begins(model)
        self._question_begins = _question_begins(model)
        self._streams = SampleStreams(self.sample, interval_s=0)

    def drain(self) -> None:
        self._streams.drain()

    def script(self, prompt_ids: bytes) -> list[int]:
        """What will be sampled, the end-of-turn token included."""
        text = self._text(prompt_ids)
        said = self._fold(text, prompt_ids) or _directive("SAY", text)
        said = said or self._step(_directive("STEPS", text), prompt_ids) or "ok"
        ids = [i for char in said for i in int32_array(self._model.encode(char))]
        return [*ids, min(self._model.stop_ids)]

    async def SampleStream(
        self, requests: AsyncIterator[inference_pb2.SampleStreamRequest], context: Any
    ) -> AsyncIterator[inference_pb2.SampleStreamResponse]:
        async for response in self._streams.serve(requests):
            yield response

    async def sample(
        self, request: inference_pb2.SampleRequest
    ) -> AsyncGenerator[inference_pb2.SampleResponse, None]:
        ids = self.script(request.prompt_ids)[: request.sampling.max_tokens]
        stop_ids = set(request.sampling.stop_token_ids)
        text = self._text(request.prompt_ids)
        pace_s = float(_directive("PACE", text) or 0.005)
        fails = _directive("FAIL", text) == self._name
        sent = 0
        try:
            while request.stream and sent < len(ids) - 1 and not (fails and sent == 3):
                yield inference_pb2.SampleResponse(tokens=self._tokens(ids, sent, sent + 1))
                sent += 1
                await asyncio.sleep(pace_s)
            if fails:
                os.kill(os.getpid(), signal.SIGKILL)
            stopped = ids[-1] in stop_ids
            yield inference_pb2.SampleResponse(
                tokens=self._tokens(ids, sent, len(ids)),
                finish_reason=common_pb2.FINISH_REASON_STOP
                if stopped
                else common_pb2.FINISH_REASON_LENGTH,
                timings=common_pb2.TurnTimings(queue_s=0.25, prefill_s=0.5, decode_s=0.75),
                cached_tokens=len(request.prompt_ids) // 8,
            )
            sent = len(ids)
        finally:
            self._log(request, ids[:sent])

    async def GetInferenceStatus(
        self, request: inference_pb2.GetInferenceStatusRequest, context: Any
    ) -> inference_pb2.GetInferenceStatusResponse:
        return inference_pb2.GetInferenceStatusResponse(
            model=self._model.name, weight_version=self._weight_version
        )

    def _step(self, steps: str, prompt_ids: bytes) -> str:
        """The one that is due; "" when there are none left."""
        answers = self._spelled(prompt_ids).count(self._answer_begins) - 1
        return dict(enumerate(steps.split("|||"))).get(answers, "")

    def _fold(self, text: str, prompt_ids: bytes) -> str:
        """The summary, if the last message asks for one; "" otherwise."""
        folded = re.sub(r"LATER\(\((.*?)\)\)", _later, _directive("FOLD", text), flags=re.DOTALL)
        if not folded or folded in text:
            return ""
        last = self._spelled(prompt_ids).rpartition(self._question_begins)[2]
        return folded if re.search("summar|snapshot", last, re.IGNORECASE) else ""

    def _spelled(self, prompt_ids: bytes) -> str:
        return "".join(self._model.piece(i) for i in int32_array(prompt_ids))

    def _text(self, prompt_ids: bytes) -> str:
        return self._model.decode(prompt_ids)

    def _tokens(self, ids: list[int], start: int, end: int) -> common_pb2.SampledTokens:
        return common_pb2.SampledTokens(
            ids=int32_bytes(ids[start:end]),
            logprobs=float32_bytes(-1 / (position + 2) for position in range(start, end)),
            weight_versions=int32_bytes([self._weight_version] * (end - start)),
        )

    def _log(self, request: inference_pb2.SampleRequest, sampled: list[int]) -> None:
        if not self._requests_file:
            return
        line = {
            "session_id": request.session_id,
            "prompt_ids": list(int32_array(request.prompt_ids)),
            "sampled_ids": sampled,
            "max_tokens": request.sampling.max_tokens,
            "min_tokens": request.sampling.min_tokens,
            "stop_token_ids": list(request.sampling.stop_token_ids),
            "frequency_penalty": request.sampling.frequency_penalty,
            "logit_bias": dict(request.sampling.logit_bias),
        }
        with Path(self._requests_file).open("a") as file:
            file.write(json.dumps(line) + "\n")


class ScriptedEngineApp:
    """Wiring, as any service's."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self.kind = kind_in(context.config.serving_group, "router")

    async def start(self) -> None:
        config = self._context.config
        self._engine = engine = ScriptedEngine(
            ChatModel.load(config.model_path),
            name=config.instance_id,
            weight_version=config.weight_version,
            requests_file=config.requests_file,
        )
        self._context.server.add_service(
            inference_pb2_grpc.add_InferenceServiceServicer_to_server, engine, full_name=FULL_NAME
        )

    async def drain(self) -> None:
        """Kept streams end with the calls on them."""
        self._engine.drain()

    async def stop(self) -> None:
        """Nothing is held."""


def start_scripted_engine(*settings: str) -> ServiceProcess:
    """The engine as a child process."""
    return start_service("tests.support.gateway.scripted_engine", *settings)


def _answer_begins(model: ChatModel) -> str:
    """What the template writes before an answer."""
    render, ask = model.template.renderer(None), [Message(role="user", content="?")]
    return render(ask, True)[len(render(ask, False)) :]


def _question_begins(model: ChatModel) -> str:
    """What the template writes before a user's message, behind an answer."""
    render, ask = model.template.renderer(None), Message(role="user", content="?")
    before = [ask, Message(role="assistant", content=".")]
    return render([*before, ask], False)[len(render(before, False)) :].partition("?")[0]


def _directive(name: str, text: str) -> str:
    found = re.findall(rf"{name}\[\[(.*?)\]\]", text, re.DOTALL)
    return str(found[-1]) if found else ""


def _later(steps: re.Match[str]) -> str:
    return f"STEPS[[{steps[1].replace(';;;', '|||')}]]"


if __name__ == "__main__":
    run("scripted-engine", ScriptedEngineConfig, lambda: ScriptedEngineApp)
