"""Protocol-independent request of one turn."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Final

from forge.core.conversation.messages import Message
from forge.v1 import common_pb2
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.call_labels import LABELS, CallLabels
from services.gateway.conversation.handles import Handle
from services.gateway.model.chat_model import Tools

SIZE_BYTES: ContextVar[int] = ContextVar("size_bytes", default=0)
"""Size of the request that this task handles; set by the edge that received it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One model call of an agent."""

    messages: Sequence[Message] = ()
    prompt_ids: bytes = b""
    """Replaces `messages` for agents that render prompts themselves."""
    tools: Tools = ()
    call_tools: bool = True
    """False: tool calls in the answer stay text."""
    parallel_calls: bool = True
    """False: the answer ends with its first tool call."""
    required_tool: str | None = None
    """Name of the tool that the answer must call; "": any tool; None: no call is required."""
    sampling: common_pb2.SamplingParams
    """Sampling parameters; the `grammar` applies to the answer, not to reasoning and tool calls."""
    asked: common_pb2.SamplingParams | None = None
    """The agent's parameters, if the session's policy replaced `sampling`."""
    choice: int = 0
    """Number of the answer among those to one prompt; see `choice_sampling`."""
    stop: Sequence[str] = ()
    template_kwargs: str = ""
    """Variables of the chat template, a JSON object; they replace those of the session's token."""
    prefill: str = ""
    """The beginning of the answer, at the end of the prompt."""
    context_action: str = ""
    handle: Handle | None = None
    """Name of the turn, unless the turn is aborted."""
    stream: bool = False
    """True: the agent gets each delta at once, so a started answer is never sampled again."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of the HTTP response; they name deviations from the request."""
    arrived: Moment
    labels: CallLabels = field(default_factory=LABELS.get)
    size_bytes: int = field(default_factory=SIZE_BYTES.get)
    """Size of the request as it was received."""
    traceparent: str = ""
    """Trace context of the model call; "": not traced."""


def choices_of(request: TurnRequest, count: int) -> list[TurnRequest]:
    """Returns the requests for `count` answers to one prompt."""
    return [replace(request, choice=number) for number in range(count)]


def choice_sampling(request: TurnRequest) -> common_pb2.SamplingParams:
    """Returns a copy of the sampling parameters; the agent's seed is that of the first answer, and
    each further one has the next seed, or all would be equal."""
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)
    if sampling.HasField("seed"):
        sampling.seed = (sampling.seed + request.choice) % 2**64
    return sampling


def sampling_values(sampling: common_pb2.SamplingParams) -> dict[str, float]:
    """Returns temperature, top_p and top_k with their defaults."""
    return {
        "temperature": sampling.temperature if sampling.HasField("temperature") else 1.0,
        "top_p": sampling.top_p if sampling.HasField("top_p") else 1.0,
        "top_k": sampling.top_k,
    }


RESHAPING: Final = (
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
"""Parameters that change the distribution in other ways."""


def reshaping_values(sampling: common_pb2.SamplingParams) -> dict[str, float]:
    """Returns those that are set; of `logit_bias` its number of tokens."""
    values = {
        name: len(sampling.logit_bias) if name == "logit_bias" else getattr(sampling, name)
        for name in RESHAPING
    }
    if values["repetition_penalty"] == 1:
        values["repetition_penalty"] = 0
    return {name: value for name, value in values.items() if value}
