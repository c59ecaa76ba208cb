"""Work of booted hosts: tasks to submit, and waits."""

from __future__ import annotations

from functools import partial

from tests.support.runtime.waiting import until_blocking

LIMIT_S = 600.0
until = partial(until_blocking, limit_s=LIMIT_S)
"""Waits for what a whole system does."""
TASKS = """
import json, sys
from random import Random
from forge.agents.environments import get_domain
for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    domain = ("qa", "code", "general", "reasoning")[seed % 4]
    payload = get_domain(domain).generate(Random(seed))
    print(json.dumps({"payload": payload, "domain": domain, "group_size": 2}))
"""
"""A program: the tasks of the seeds from its first argument to its second one, as JSON lines."""
