"""Harmony against OpenAI's own implementation: both read what the other writes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from forge.core.conversation.messages import Message, ToolCall
from forge.core.formats import SAMPLE_TOOLS, CallDelta, collect, get_format
from tests.support.clients.programs import PROGRAMS_DIR, VENV
from tests.support.gateway.chat_templates import make_model

FORMAT = get_format("harmony")
CONVERSATIONS = 60
WORDS = [
    "look",
    " at",
    "it",
    "é日🙂",
    '"quoted"',
    "{}",
    "\n\n",
    "<tag>",
    " to=me",
    "json",
    "\\n",
    "1",
]
ENDS = ("<|call|>", "<|return|>", "<|end|>")
JSON_TYPE = "<|constrain|>json"


def oracle(
    messages: Sequence[Sequence[dict[str, str]]] = (), texts: Sequence[str] = ()
) -> dict[str, Any]:
    asked = json.dumps({"messages": messages, "texts": texts})
    words = [VENV / "bin/python", PROGRAMS_DIR / "harmony_oracle.py"]
    ended = subprocess.run(words, input=asked, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-2000:]
    answers: dict[str, Any] = json.loads(ended.stdout)
    return answers


def said(random: Random) -> str:
    return "".join(random.choices(WORDS, k=random.randrange(1, 9))).strip() or "a"


def arguments(random: Random) -> str:
    return json.dumps({"at": said(random), "deep": [random.randrange(9)]}, ensure_ascii=False)


def some_answer(random: Random) -> list[dict[str, str]]:
    """Reasoning, a preamble and calls, or a final answer."""
    answer = [{"channel": "analysis", "content": said(random)}] * (random.random() < 0.8)
    if random.random() < 0.4:
        return [*answer, {"channel": "final", "content": said(random)}]
    if random.random() < 0.4:
        answer.append({"channel": "commentary", "content": said(random)})
    for _ in range(random.choice((1, 1, 2))):
        call = {"channel": "commentary", "recipient": "functions.look"}
        answer.append(call | {"content_type": JSON_TYPE, "content": arguments(random)})
    return answer


def check_read(written: str, messages: Sequence[dict[str, str]]) -> None:
    """Our parser returns the messages of an answer."""
    text = written.removeprefix("<|start|>assistant")
    for end in ENDS:
        text = text.removesuffix(end)
    # A second call of one answer comes after the end of the first one, which stops the model.
    parser = FORMAT.parser(SAMPLE_TOOLS)
    read = collect([*parser.feed(text.replace("<|call|>", "<|end|>")), *parser.finish()], "")
    calls = [one["content"] for one in messages if "recipient" in one]
    plain = [one for one in messages if "recipient" not in one]
    assert parser.error == "", text
    assert [json.loads(call.arguments) for call in read.calls] == [json.loads(c) for c in calls]
    assert [call.name for call in read.calls] == ["look"] * len(calls)
    assert read.reasoning == "".join(o["content"] for o in plain if o["channel"] == "analysis")
    assert read.content == "".join(o["content"] for o in plain if o["channel"] != "analysis")


def test_what_openai_writes_is_read() -> None:
    """Reasoning, content and calls of random answers, in its own spelling of headers."""
    random = Random(0)
    answers = [some_answer(random) for _ in range(CONVERSATIONS)]
    asked = [[one | {"role": "assistant"} for one in answer] for answer in answers]
    for written, answer in zip(oracle(asked)["texts"], answers, strict=True):
        check_read(written, answer)


def test_openai_reads_what_the_format_writes() -> None:
    """Calls of the format, and a call behind the opening that `tool_choice` forces."""
    random = Random(1)
    given = [
        [arguments(random) for _ in range(random.choice((1, 2)))] for _ in range(CONVERSATIONS)
    ]
    texts = [
        FORMAT.write([CallDelta(name="look", arguments=one) for one in calls]) + "<|call|>"
        for calls in given
    ]
    forced = FORMAT.opening("look") + '{"at": "a"}<|call|>'
    *read, (behind,) = oracle(texts=[*texts, forced])["messages"]
    for messages, calls in zip(read, given, strict=True):
        assert [one["recipient"] for one in messages] == ["functions.look"] * len(calls)
        assert [one["content"] for one in messages] == calls
    assert (behind["recipient"], behind["content"]) == ("functions.look", '{"at": "a"}')


@pytest.mark.parametrize("tools", [None, SAMPLE_TOOLS])
def test_openai_reads_the_prompts_of_the_template(tools: Any) -> None:
    """Of a tool loop: question, reasoning, call, result, and the answer of the turn before."""
    loop = [
        Message(role="user", content="One?"),
        Message(role="assistant", content="One."),
        Message(role="user", content="Where?"),
        Message(
            role="assistant",
            reasoning="I must look.",
            tool_calls=(ToolCall(name="look", arguments='{"at": "a"}', call_id="c1"),),
        ),
        Message(role="tool", content="nothing", tool_call_id="c1"),
    ]
    prompt = make_model("harmony").template.renderer(tools)(loop, False)
    (messages,) = oracle(texts=[prompt])["messages"]
    kinds = [(m["role"], m["name"], m["channel"], m["recipient"], m["content"]) for m in messages]
    assert [kind for kind in kinds if kind[0] not in ("system", "developer")] == [
        ("user", "", "", "", "One?"),
        ("assistant", "", "final", "", "One."),
        ("user", "", "", "", "Where?"),
        ("assistant", "", "analysis", "", "I must look."),
        ("assistant", "", "commentary", "functions.look", '{"at": "a"}'),
        ("tool", "functions.look", "commentary", "assistant", '"nothing"'),
    ]
