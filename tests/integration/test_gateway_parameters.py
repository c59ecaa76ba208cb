"""What a gateway honours of unmodified SDKs' requests, and how it says what it does not."""

from __future__ import annotations

import base64
import json
from typing import Any

from forge.runtime.coordination import Coordinator, Instance
from tests.support.gateway.stack import GatewayStack, check_exact, recorded

PNG = base64.b64encode(b"p" * 70).decode()
SHOWN = "[image omitted: image/png, 70 bytes]"
IMAGES_OMITTED = "x-forge-images-omitted"


async def test_an_agent_that_looks_at_an_image_goes_on(
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
