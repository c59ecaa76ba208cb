"""Work of booted hosts: tasks to submit, and waits."""

from __future__ import annotations

from functools import partial

from tests.support.runtime.waiting import until_blocking

LIMIT_S = 600.0
until = partial(until_blocking, limit_s=LIMIT_S, least_pause_s=1.0)
"""Waits for what a whole system does. Most conditions start `forge status`, which would take a core
from the services if it were started again at once."""
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
SESSIONS = """
import re, sys
from pathlib import Path
from urllib.request import Request, urlopen
from forge.runtime.security.tokens import Claims, Keyring
port, *metrics_ports = sys.argv[1:]
keyring = Keyring.from_file("/etc/forge/key")
for number in range(20):
    name = f"probe-{number}:0:0"
    claims = Claims(
        subject=name, scopes=frozenset({"session"}), trajectory_id=name,
        task_id=name.partition(":")[0], domain="qa", pool_shard="pool-1",
    )
    headers = {"x-api-key": keyring.sign(claims)}
    urlopen(Request(f"http://127.0.0.1:{port}/v1/models", headers=headers), timeout=60).read()
pattern = r'^forge_gateway_shared_port_connections_total\\{result="handed_over"\\} (\\S+)$'
counts = [
    sum(float(found) for found in re.findall(
        pattern, urlopen(f"http://127.0.0.1:{one}/metrics", timeout=60).read().decode(), re.M
    ))
    for one in metrics_ports
]
print("handed over by both" if all(counts) else counts)
"""
"""A program: a request of each of twenty sessions to the port of its first argument, each on a new
connection; the others are the metrics ports of the gateways behind it."""
READ = """
import sys
from urllib.error import HTTPError
from urllib.request import Request, urlopen
url, *token = sys.argv[1:]
headers = {"Authorization": f"Bearer {one}" for one in token}
try:
    print(urlopen(Request(url, headers=headers), timeout=60).status)
except HTTPError as error:
    print(error.code)
"""
"""A program: the HTTP status of a URL, read with the token of the second argument, if any."""
