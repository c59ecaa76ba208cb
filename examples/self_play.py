"""The policy plays against its own older version, and another model judges: one key, one base URL.

    forge up --models examples/models.toml \\
        --set runner.command='.venv/bin/python examples/self_play.py {prompt}'

`model` in each request names the player. The policy's moves are trained; those of `old` and the
verdict of `judge` are recorded with them and trained by nothing. A program that knows OpenAI's API
needs no more than this.
"""

import os
import sys

from openai import OpenAI

ROUNDS = 2
PLAYERS = {"policy": "You play first.", "old": "You play second."}


def said(client: OpenAI, model: str, messages: list[dict[str, str]]) -> str:
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=48)
    return answer.choices[0].message.content or ""


def main(topic: str) -> None:
    client = OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    # Each player sees its own side: its moves are the assistant's, those of the other a user's.
    sides = {
        name: [{"role": "user", "content": f"{topic} {role}"}] for name, role in PLAYERS.items()
    }
    moves = []
    for _ in range(ROUNDS):
        for player, other in (("policy", "old"), ("old", "policy")):
            move = said(client, player, sides[player])
            moves.append(f"{player}: {move}")
            sides[player].append({"role": "assistant", "content": move})
            sides[other].append({"role": "user", "content": f"The other says: {move}"})
    verdict = said(client, "judge", [{"role": "user", "content": "Who wins?\n" + "\n".join(moves)}])
    print(f"verdict: {verdict}")
    # The last line is the answer that the runner scores: the policy's last move.
    print(moves[-2].removeprefix("policy: "))


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
