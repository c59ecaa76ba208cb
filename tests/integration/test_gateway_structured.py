"""Structured output through everything real: gateway, router, prefill, decode, random weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import jsonschema
import pytest
import pytest_asyncio
import torch
from openai import BadRequestError
from openai.lib._parsing._completions import type_to_response_format_param
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from forge.client.reward_events import reward_event
from forge.core.token_columns import float32_array, int32_array
from forge.runtime.coordination import Coordinator, Instance
from forge.v1 import common_pb2
from services.inference.engines.base import Grammar
from tests.contract.engines import published
from tests.support.gateway.chat_templates import make_tokenizer
from tests.support.gateway.stack import GatewayStack, recorded, token_tree
from tests.support.inference.cluster import InferenceCluster
from tests.support.inference.masked_logprobs import masked_logprobs
from tests.support.runtime.etcd import EtcdServer

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")

CLUSTER = "gateway-structured"
CONTEXT_TOKENS = 2048
END = make_tokenizer("chatml").eos_token_id
CONFIG = Qwen3Config(
    # Padded, as many models' are.
    vocab_size=len(make_tokenizer("chatml")) + 12,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=CONTEXT_TOKENS,
    eos_token_id=END,
    bos_token_id=None,
    initializer_range=0.2,
    tie_word_embeddings=True,
)
TAKE = {
    "type": "function",
    "function": {
        "name": "take",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"what": {"enum": ["key", "map"]}, "count": {"enum": [1, 2, 3]}},
            "required": ["what", "count"],
            "additionalProperties": False,
        },
    },
}


class Place(BaseModel):
    name: str = Field(max_length=4)
    kind: Literal["city", "sea"]
    size: int | None = Field(ge=-99, le=99)


class Atlas(BaseModel):
    places: list[Place] = Field(max_length=2)
    sound: bool


def reference() -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    return model.eval().requires_grad_(False)


@pytest_asyncio.fixture(scope="module")
async def coordinator(shared_etcd: EtcdServer) -> AsyncIterator[Coordinator]:
    connected = await Coordinator.connect(shared_etcd.endpoint, cluster=CLUSTER)
    yield connected
    await connected.close()


@pytest_asyncio.fixture(scope="module")
async def stack(
    shared_etcd: EtcdServer, coordinator: Coordinator, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GatewayStack]:
    folder = tmp_path_factory.mktemp("structured")
    made = GatewayStack(
        folder=folder, etcd=shared_etcd, cluster=CLUSTER, context_tokens=CONTEXT_TOKENS
    )
    CONFIG.save_pretrained(made.model_path)
    made.pool.start()
    made.start_gateway("gateway-0")
    yield made
    made.stop()


@pytest_asyncio.fixture(scope="module")
async def inference(
    stack: GatewayStack, coordinator: Coordinator
) -> AsyncIterator[InferenceCluster]:
    """With one worker of each role and weights published."""
    # In the pool's folder, whose key it takes.
    made = InferenceCluster(
        stack.folder / "pool", stack.model_path, coordinator, stack.etcd, CLUSTER
    )
    await made.publisher.start()
    made.start("router")
    await made.publisher.publish(published(reference()))
    for role in ("prefill", "decode"):
        await made.workers(role, 1)
    yield made
    await made.stop()


@pytest_asyncio.fixture(scope="module")
async def gateway(
    stack: GatewayStack, inference: InferenceCluster, coordinator: Coordinator
) -> Instance:
    return await stack.gateway(coordinator)


def ask(text: str = "Which?") -> list[Any]:
    return [{"role": "user", "content": text}]


async def close(stack: GatewayStack, gateway: Instance, trajectory_id: str) -> None:
    """All its turns are on disk when this returns."""
    async with stack.agent(gateway, stack.token(trajectory_id)) as agent:
        await agent.close(reward_event("solved", 1.0))


async def test_pydantic_model_is_parsed_with_exact_log_probs(
    stack: GatewayStack, gateway: Instance, coordinator: Coordinator
) -> None:
    """The SDK's parse returns the object for any weights, whole and streamed; recorded log-probs
    are of the masked distribution, with the share that the mask left."""
    client = stack.openai(gateway, stack.token("parse:0:0"))
    completion = await client.chat.completions.parse(
        model="policy", messages=ask(), response_format=Atlas, n=2, seed=5
    )
    for choice in completion.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Atlas)
    assert len({choice.message.content for choice in completion.choices}) == 2
    async with client.chat.completions.stream(
        model="policy", messages=ask("And?"), response_format=Atlas, temperature=0.7, seed=6
    ) as stream:
        last = await stream.get_final_completion()
    assert isinstance(last.choices[0].message.parsed, Atlas)

    await close(stack, gateway, "parse:0:0")
    trajectory = await recorded(stack, coordinator, "parse:0:0")
    tree = token_tree(trajectory)
    asked: Any = type_to_response_format_param(Atlas)
    schema = json.dumps(asked["json_schema"]["schema"], ensure_ascii=False)
    assert len(trajectory.turns) == 3
    for turn in trajectory.turns:
        sampled = list(int32_array(turn.sampled.ids))
        assert sampled[-1] == END
        logprobs, allowed = await masked_logprobs(
            reference(), stack.model_path, list(int32_array(tree.context(turn.turn_index))),
            sampled, grammar=Grammar(kind="json_schema", text=schema),
            stop_ids=frozenset({END}), temperature=turn.temperature,
        )  # fmt: skip
        assert float32_array(turn.sampled.logprobs).tolist() == pytest.approx(logprobs, abs=2e-4)
        recorded_shares = float32_array(turn.sampled.allowed_logprobs).tolist()
        assert recorded_shares == pytest.approx(allowed, abs=2e-4)
        # The weights know no JSON: the mask did something nearly everywhere.
        assert sum(share < -1 for share in allowed) > len(allowed) / 2


async def test_top_logprobs_are_returned_and_never_stored(
    stack: GatewayStack, gateway: Instance, coordinator: Coordinator
) -> None:
    """Whole, streamed and in responses: as many as requested, with the sampled token if it is one
    of them; the pool has none."""
    client = stack.openai(gateway, stack.token("likeliest:0:0"))
    # Twelve tokens, whatever the seed draws.
    asked: Any = {"model": "policy", "messages": ask(), "seed": 4, "max_tokens": 12}
    asked["extra_body"] = {"min_tokens": 12}
    whole = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=20)
    told = whole.choices[0].logprobs
    streamed: list[Any] = []
    stream = await client.chat.completions.create(
        **asked, logprobs=True, top_logprobs=20, stream=True
    )
    async for chunk in stream:
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert told is not None
    assert streamed == told.content
    assert len(streamed) == 12
    for token in streamed:
        assert len(token.top_logprobs) == 20
        values = [top.logprob for top in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert token.logprob < values[-1] or token.logprob in values
    response = await client.responses.create(
        model="policy", input="Which?", max_output_tokens=12, top_logprobs=3
    )
    (part,) = response.output[0].content  # type: ignore[union-attr, misc]
    assert {len(token.top_logprobs) for token in part.logprobs} == {3}  # type: ignore[union-attr]
    assert response.top_logprobs == 3
    with pytest.raises(BadRequestError, match="top_logprobs = 21"):
        await client.chat.completions.create(**asked, logprobs=True, top_logprobs=21)
    with pytest.raises(BadRequestError, match="needs logprobs"):
        await client.chat.completions.create(**asked, top_logprobs=2)

    await close(stack, gateway, "likeliest:0:0")
    trajectory = await recorded(stack, coordinator, "likeliest:0:0")
    assert len(trajectory.turns) == 3
    for turn in trajectory.turns:
        assert not turn.sampled.top_ids
        assert not turn.sampled.top_logprobs


async def test_required_call_of_random_weights_is_complete(
    stack: GatewayStack, gateway: Instance
) -> None:
    """Its arguments satisfy the schema, and the answer ends there."""
    client = stack.openai(gateway, stack.token("calls:0:0"))
    choices: Any = ("required", {"type": "function", "function": {"name": "take"}})
    for choice in choices:
        completion = await client.chat.completions.create(
            model="policy",
            messages=ask(),
            tools=[TAKE],  # type: ignore[list-item]
            tool_choice=choice,
            parallel_tool_calls=False,
            seed=1,
        )
        answer = completion.choices[0]
        assert answer.finish_reason == "tool_calls"
        assert not answer.message.content
        assert answer.message.tool_calls is not None
        (call,) = answer.message.tool_calls
        arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
        jsonschema.validate(arguments, TAKE["function"]["parameters"])  # type: ignore[index]


async def test_unsupported_schema_is_refused_before_sampling(
    stack: GatewayStack, gateway: Instance, coordinator: Coordinator
) -> None:
    """400 names the place in the schema; an answer that is too long ends by its length."""
    client = stack.openai(gateway, stack.token("refused:0:0"))

    async def create(**fields: Any) -> Any:
        return await client.chat.completions.create(model="policy", messages=ask(), **fields)

    def of(schema: dict[str, Any]) -> dict[str, Any]:
        named = {"name": "it", "schema": schema, "strict": True}
        return {"type": "json_schema", "json_schema": named}

    unsound = of({"type": "object", "properties": {"a": {"items": {"type": "strin"}}}})
    for fields, words in (
        ({"response_format": unsound}, "response_format.json_schema.schema/properties/a/items"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "yaml"}}, "yaml"),
        ({"response_format": {"type": "json_object"}, "stop": ["x"]}, "stop"),
        (
            {
                "response_format": {"type": "json_object"},
                "tools": [TAKE],
                "tool_choice": "required",
            },
            "tool_choice",
        ),
    ):
        with pytest.raises(BadRequestError) as refused:
            await create(**fields)
        assert words in refused.value.message
    cut = await create(response_format={"type": "json_object"}, max_tokens=2)
    assert cut.choices[0].finish_reason == "length"
    await close(stack, gateway, "refused:0:0")
    (turn,) = (await recorded(stack, coordinator, "refused:0:0")).turns
    assert turn.finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_answer_under_a_grammar_survives_its_worker(
    stack: GatewayStack, gateway: Instance, inference: InferenceCluster
) -> None:
    """kill -9 of the sampling worker in mid-answer: another continues inside the grammar."""
    # Long, and without the white space that random weights are fond of.
    schema = {"type": "string", "pattern": "^[ab]{400}$"}
    await inference.workers("decode", 2)
    client = stack.openai(gateway, stack.token("killed:0:0"))
    named: Any = {"name": "it", "schema": schema, "strict": True}
    with inference.held_answers(200):
        answering = asyncio.create_task(
            client.chat.completions.create(
                model="policy",
                messages=ask(),
                response_format={"type": "json_schema", "json_schema": named},
                seed=2,
            )
        )
        (busy,) = await inference.sampling(answering)
        inference.kill(busy)
    completion = await answering
    assert completion.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(completion.choices[0].message.content or ""), schema)
