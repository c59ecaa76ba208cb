"""What a gateway honours of unmodified SDKs' requests, and how it says what it does not."""

from __future__ import annotations

import base64
import json
from typing import Any

import aiohttp
import pytest
from openai import BadRequestError

from forge.core.token_columns import int32_array
from forge.runtime.coordination import Coordinator, Instance
from forge.v1 import common_pb2
from tests.support.gateway.stack import GatewayStack, check_exact, recorded

FAMILY = "qwen3"
PNG = base64.b64encode(b"p" * 70).decode()
SHOWN = "[image omitted: image/png, 70 bytes]"
IMAGES_OMITTED = "x-forge-images-omitted"


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def post(gateway: Instance, token: str, path: str, **body: Any) -> Any:
    """The answer of a route that the SDKs do not have."""
    headers = {"Authorization": f"Bearer {token}"}
    url = f"http://{gateway.metadata['http']}{path}"
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as got:
        assert got.status == 200, await got.text()
        return await got.json()


async def test_agent_that_sends_an_image_continues(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """In all three protocols the prompt has the text for the image, the response says so, and the
    record has its type and size."""
    token = stack.token("images:0:0")
    openai, anthropic = stack.openai(gateway, token), stack.anthropic(gateway, token)
    url = f"data:image/png;base64,{PNG}"
    part: Any = {"type": "image_url", "image_url": {"url": url}}
    chat = await openai.chat.completions.with_raw_response.create(
        model="policy", messages=[{"role": "user", "content": [part]}]
    )
    item: Any = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    async with openai.responses.with_streaming_response.create(
        model="policy", input=[item, item], stream=True
    ) as responses:
        await responses.read()
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    block: Any = {"type": "image", "source": source}
    messages = await anthropic.messages.with_raw_response.create(
        model="policy", max_tokens=9, messages=[{"role": "user", "content": ["?", block][1:]}]
    )
    omitted = [one.headers.get(IMAGES_OMITTED) for one in (chat, responses, messages)]
    # The third prompt is the first one again.
    assert omitted == ["1", "1", None]
    async with stack.agent(gateway, token) as agent:
        await agent.close(abandon_reason="seen")
    trajectory = await recorded(stack, own_coordinator, "images:0:0")
    (image,) = json.loads(trajectory.turns[0].messages_json)["messages"]
    assert image["content"] == SHOWN
    assert image["images"] == [{"media_type": "image/png", "size_bytes": 70}]
    check_exact(stack, trajectory)


async def closed(
    stack: GatewayStack, gateway: Instance, coordinator: Coordinator, trajectory_id: str
) -> common_pb2.Trajectory:
    """The record of an abandoned session, checked against what the engine sampled."""
    async with stack.agent(gateway, stack.token(trajectory_id)) as agent:
        await agent.close(abandon_reason="seen")
    trajectory = await recorded(stack, coordinator, trajectory_id)
    check_exact(stack, trajectory)
    return trajectory


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_an_answer_continues_the_assistants_last_message(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator, streamed: bool
) -> None:
    """Over chat and over Anthropic's protocol alike: the response has the new text, the prompt and
    the record the whole answer, and the next turn continues it."""
    name = f"prefill-{streamed}:0:0"
    token = stack.token(name)
    openai, anthropic = stack.openai(gateway, token), stack.anthropic(gateway, token)
    said: Any = {"role": "assistant", "content": "It is <"}
    messages: list[Any] = [user("Six times seven? SAY[[42>.]]"), said]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    if streamed:
        chunks = await openai.chat.completions.create(
            model="policy", messages=messages, extra_body=flags | {"echo": True}, stream=True
        )
        texts = [chunk.choices[0].delta.content or "" async for chunk in chunks]
        assert "".join(texts) == "It is <42>."
        async with anthropic.messages.stream(
            model="policy", max_tokens=99, messages=messages
        ) as stream:
            assert "".join([text async for text in stream.text_stream]) == "42>."
    else:
        chat = await openai.chat.completions.create(
            model="policy", messages=messages, extra_body=flags
        )
        assert chat.choices[0].message.content == "42>."
        message = await anthropic.messages.create(model="policy", max_tokens=99, messages=messages)
        assert message.content[0].text == "42>."  # type: ignore[union-attr]
    messages[-1] = {"role": "assistant", "content": "It is <42>."}
    await openai.chat.completions.create(model="policy", messages=[*messages, user("Sure?")])
    trajectory = await closed(stack, gateway, own_coordinator, name)
    contexts = [json.loads(turn.messages_json) for turn in trajectory.turns]
    assert contexts[0]["answer"]["content"] == "It is <42>."
    assert contexts[0]["opening"] == "It is <"
    first, _, last = trajectory.turns
    # Both requests had the same prompt; the third continues their answer.
    assert last.prefix_tokens * 4 == len(first.prompt_ids) + len(first.sampled.ids)


async def test_white_box_clients_get_their_tokens(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """Ids of prompt and answer, also in streams, as they are on record."""
    client = stack.openai(gateway, stack.token("ids:0:0"))
    ask: dict[str, Any] = {"model": "policy", "messages": [user("SAY[[yes, it is]] PACE[[0]]")]}
    ask |= {"extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True}}
    whole: Any = await client.chat.completions.create(**ask, logprobs=True, n=2)
    chunks: Any = [
        chunk async for chunk in await client.chat.completions.create(**ask, stream=True)
    ]
    prompt_ids, token_ids = whole.prompt_token_ids, whole.choices[1].token_ids
    assert whole.choices[1].logprobs is not None
    named = [token.token for token in whole.choices[1].logprobs.content or ()]
    assert named == [f"token_id:{token}" for token in token_ids]
    assert chunks[0].prompt_token_ids == prompt_ids
    choices = [chunk.choices[0].to_dict() for chunk in chunks]
    streamed: Any = [choice.get("token_ids", []) for choice in choices]
    assert [token for part in streamed for token in part] == token_ids
    trajectory = await closed(stack, gateway, own_coordinator, "ids:0:0")
    assert list(int32_array(trajectory.turns[0].prompt_ids)) == prompt_ids
    assert list(int32_array(trajectory.turns[0].sampled.ids)) == token_ids


async def test_completions_take_and_return_text_and_ids(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """`/tokenize` gives the ids of a text; prompts of ids and of text make the same turns, whole
    and streamed, with log-probs and with the prompt before the answer."""
    token = stack.token("completions:0:0")
    client = stack.openai(gateway, token)
    text = "Say it. SAY[[so]]"
    tokenized = await post(gateway, token, "/tokenize", prompt=text, return_token_strs=True)
    assert "".join(tokenized["token_strs"]) == text
    assert (tokenized["count"], tokenized["max_model_len"]) == (len(tokenized["tokens"]), 4096)
    back = await post(gateway, token, "/detokenize", tokens=tokenized["tokens"])
    assert back == {"prompt": text}
    extra = {"return_token_ids": True}
    ask: dict[str, Any] = {"model": "policy", "extra_body": extra, "max_tokens": 50}
    whole: Any = await client.completions.create(
        prompt=[tokenized["tokens"]] * 2, logprobs=0, n=2, **ask
    )
    assert [choice.text for choice in whole.choices] == ["so"] * 4
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    first = whole.choices[0]
    assert first.prompt_token_ids == tokenized["tokens"]
    assert first.logprobs is not None and first.logprobs.token_logprobs is not None
    assert first.logprobs.token_logprobs[:2] == pytest.approx([-1 / 2, -1 / 3])
    assert whole.usage is not None and whole.usage.prompt_tokens == 2 * tokenized["count"]
    chunks = [
        chunk async for chunk in await client.completions.create(
            prompt=text, echo=True, stream=True, **ask
        )
    ]  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks) == f"{text}so"
    assert chunks[-1].choices[0].finish_reason == "stop"
    ids: Any = [chunk.choices[0].to_dict().get("token_ids", []) for chunk in chunks]
    assert [one for part in ids for one in part] == first.token_ids
    trajectory = await closed(stack, gateway, own_coordinator, "completions:0:0")
    assert len(trajectory.turns) == 5
    assert not any(turn.messages_json for turn in trajectory.turns)


async def test_template_variables_come_from_token_and_request(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """The task's are in the session token; a request replaces them; an unknown one is refused; and
    `/tokenize` shows the same prompt."""
    off = '{"enable_thinking":false}'
    token = stack.token("template:0:0", chat_template_kwargs=off)
    client = stack.openai(gateway, token)
    messages: list[Any] = [user("hi")]
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    for extra in ({}, on):
        shown = await post(gateway, token, "/tokenize", messages=messages, **extra)
        answer: Any = await client.chat.completions.create(
            model="policy", messages=messages, extra_body=extra | {"return_token_ids": True}
        )
        assert answer.prompt_token_ids == shown["tokens"]
        text = (await post(gateway, token, "/detokenize", tokens=shown["tokens"]))["prompt"]
        assert text.endswith("</think>\n\n") == (not extra)
    with pytest.raises(BadRequestError, match=r"thinking_budget = 5.*enable_thinking"):
        await client.chat.completions.create(
            model="policy",
            messages=messages,
            extra_body={"chat_template_kwargs": {"thinking_budget": 5}},
        )
    trajectory = await closed(stack, gateway, own_coordinator, "template:0:0")
    contexts = [json.loads(turn.messages_json) for turn in trajectory.turns]
    kept = [context.get("template_kwargs") for context in contexts]
    assert kept == [{"enable_thinking": False}, {"enable_thinking": True}]


async def test_parameters_without_effect_are_named_and_others_reach_the_engine(
    stack: GatewayStack, gateway: Instance, own_coordinator: Coordinator
) -> None:
    """A field without effect and an unknown one are named in a header, also of a stream; the answer
    has the requested model name; and the engine gets length, stop tokens and penalties."""
    token = stack.token("told:0:0")
    client = stack.openai(gateway, token)
    end = (await post(gateway, token, "/tokenize", prompt="!"))["tokens"][0]
    ask: dict[str, Any] = {"messages": [user("SAY[[yes!no]]")], "verbosity": "low"}
    extra = {"zeal": 1, "min_tokens": 3, "stop_token_ids": [end], "min_p": 0.1}
    penalties: dict[str, Any] = {"frequency_penalty": 0.5, "logit_bias": {"7": -100}}
    raw = await client.chat.completions.with_raw_response.create(
        model="model", extra_body=extra, user="me", **penalties, **ask
    )
    assert raw.headers["x-forge-ignored"] == "verbosity, zeal"
    assert raw.parse().model == "model"
    async with client.chat.completions.with_streaming_response.create(
        model="policy", stream=True, **ask
    ) as response:
        assert response.headers["x-forge-ignored"] == "verbosity"
        assert b'"model":"policy"' in await response.read()
    assert [model.id for model in (await client.models.list()).data] == ["policy", "model"]
    sampled = stack.sampled("told:0:0")[0]
    assert sampled["min_tokens"] == 3
    assert end in sampled["stop_token_ids"]
    assert sampled["frequency_penalty"] == 0.5
    assert sampled["logit_bias"] == {"7": -100.0}
    turn = (await closed(stack, gateway, own_coordinator, "told:0:0")).turns[0]
    assert (turn.frequency_penalty, turn.logit_bias) == (0.5, True)
    assert turn.min_p == pytest.approx(0.1)
