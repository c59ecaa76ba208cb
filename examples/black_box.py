"""An agent that knows nothing of Forge: any OpenAI program, as it is.

    forge agents run --command '.venv/bin/python examples/black_box.py {prompt}'

The runner sets OPENAI_BASE_URL and OPENAI_API_KEY; the last line printed is the answer.
"""

import sys

from openai import OpenAI

client = OpenAI()
model = client.models.list().data[0].id
task = [{"role": "user", "content": sys.argv[1]}]
reply = client.chat.completions.create(model=model, messages=task, max_tokens=64)
print(reply.choices[0].message.content)
