"""The OpenAI client that the rollouts of a scaffold share."""

from __future__ import annotations

import ssl

from openai import AsyncOpenAI, DefaultAsyncHttpxClient


def shared_client(*, timeout_s: float, tls_ca: str) -> AsyncOpenAI:
    """Return a client without address and key; `with_options` sets those of a rollout.

    One connection pool for all rollouts: a client per rollout would cost 50 ms each.
    """
    return AsyncOpenAI(
        api_key="set per rollout",
        base_url="http://set-per-rollout",
        timeout=timeout_s,
        max_retries=4,
        http_client=DefaultAsyncHttpxClient(
            verify=ssl.create_default_context(cafile=tls_ca) if tls_ca else True,
            trust_env=False,
        ),
    )
