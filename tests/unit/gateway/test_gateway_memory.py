"""How the gateway's process holds its memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COPIES = """
import resource
from services.gateway.memory import keep_freed_memory
keep_freed_memory()
prompt = bytes(1 << 20)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        bytearray(prompt[1:])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_copies_of_a_prompt_cost_no_page_faults() -> None:
    """Memory freed by one copy is there for the next: a copy of 1 MiB has 256 pages otherwise."""
    ran = subprocess.run([sys.executable, "-c", COPIES], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 100
