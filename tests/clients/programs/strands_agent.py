"""Strands Agents over LiteLLM: the room, or, told "shell", a job whose history outgrows the model.

It folds its history when the model refuses a prompt that is too long, and only then.
"""

import subprocess

from room import MODEL, look, report, task, wants
from strands import Agent, tool
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.models.litellm import LiteLLMModel


@tool
def shell(command: str) -> str:
    """Run a command of the shell.

    Args:
        command: the command
    """
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


pieces = 0


def count(**event: object) -> None:
    global pieces
    pieces += "data" in event


agent = Agent(
    model=LiteLLMModel(model_id=f"openai/{MODEL}", stream=wants("stream")),
    tools=[shell if wants("shell") else tool(look)],
    system_prompt="Be brief.",
    conversation_manager=SummarizingConversationManager(
        summary_ratio=0.8, preserve_recent_messages=2
    ),
    callback_handler=count,
)
answer = agent(task())
report("strands-agents", str(answer).strip(), pieces)
