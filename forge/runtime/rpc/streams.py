"""Streams with a limit on silence instead of a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from typing import TypeVar

from forge.core.errors import DeadlineExceeded
from forge.runtime.rpc.status import translated

Response = TypeVar("Response")


async def flowing(
    responses: AsyncIterable[Response], *, silence_s: float, source: str
) -> AsyncIterator[Response]:
    """Yield the responses of a call without a deadline.

    Raises DeadlineExceeded with the name `source` after `silence_s` without a response, and the
    ForgeError of the call's status.
    """
    left = aiter(responses)
    async with translated():
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    response = await anext(left)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineExceeded(f"{source} sent nothing for {silence_s:g} s") from None
            yield response
