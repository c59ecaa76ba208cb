"""The blocking client: an agent without an event loop, three attempts in threads, one vote.

forge agents run --command '.venv/bin/python examples/threads.py'
"""

import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from forge.client import SyncAgentSession

task = json.loads(os.environ["FORGE_TASK_JSON"])["messages"]
with SyncAgentSession.from_env() as session, ThreadPoolExecutor(3) as threads:
    answers = threads.map(lambda _: session.chat(task, max_tokens=64).text, range(3))
    print(Counter(answers).most_common(1)[0][0])
