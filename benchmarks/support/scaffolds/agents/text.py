"""An agent of plain text over OpenAI's completions.

It renders its prompt itself, in ChatML, describes examples and tools in the user's message, reads
calls from the text of an answer, and reports their results as messages of the user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

# The SDK imports this at the first call, which would hold up the event loop.
import openai.resources.completions  # noqa: F401

from benchmarks.support.scaffolds.agents.attempt import MODEL, Attempt
from forge.agents.environments.base import Episode, Transcript
from forge.agents.rollout import Rollout
from forge.agents.scaffolds.openai_client import shared_client

SYSTEM = "Solve the task. {task}"
TOOLS = "Tools: {signatures}"
RESULT = "<tool_response>{result}</tool_response>"
ASSISTANT = "<|im_start|>assistant\n"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class Text:
    """A loop over a transcript that the agent itself writes."""

    def __init__(self, *, timeout_s: float, tls_ca: str = "") -> None:
        self._base = shared_client(timeout_s=timeout_s, tls_ca=tls_ca)

    async def run(self, rollout: Rollout, episode: Episode) -> Transcript:
        """As `Scaffold.run`."""
        attempt = Attempt(rollout, episode)
        client = self._base.with_options(
            base_url=f"{rollout.gateway.http_url}/v1", api_key=rollout.session_token
        )
        prompt = opening(attempt)
        with attempt.refusals():
            while not attempt.over:
                prompt += ASSISTANT
                completion = await client.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=rollout.max_tokens
                )
                answer = completion.choices[0].text
                calls = calls_in(answer)
                results = await attempt.answered(_CALL.sub("", answer), calls)
                if not calls:
                    break
                prompt += f"{answer}<|im_end|>\n"
                prompt += "".join(rendered("user", RESULT.format(result=one)) for one in results)
        return attempt.transcript()

    async def close(self) -> None:
        """Closes the connections."""
        await self._base.close()


def opening(attempt: Attempt) -> str:
    """Returns the prompt before the first answer."""
    lines = [message["content"] for message in attempt.dialogue]
    if attempt.tools:
        lines.insert(0, TOOLS.format(signatures="; ".join(signatures(attempt.tools))))
    system = SYSTEM.format(task=attempt.system).strip()
    return rendered("system", system) + rendered("user", "\n".join(lines))


def rendered(role: str, text: str) -> str:
    """Returns one message in ChatML."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def signatures(tools: Sequence[dict[str, Any]]) -> list[str]:
    """Returns each tool as `name(parameters)`."""
    return [f"{tool['name']}({', '.join(tool['parameters']['properties'])})" for tool in tools]


def calls_in(answer: str) -> list[tuple[str, str, str]]:
    """Returns id, name and JSON arguments of the calls in an answer; malformed ones are text."""
    calls = []
    for number, body in enumerate(_CALL.findall(answer)):
        try:
            call = json.loads(body)
            calls.append((f"call_{number}", str(call["name"]), json.dumps(call["arguments"])))
        except (ValueError, TypeError, KeyError):
            continue
    return calls
