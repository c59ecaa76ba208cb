"""Freed memory that is kept is not faulted in again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
from forge.runtime.process.allocator import keep_freed_memory

def rounds(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        kept = [bytes(16_000) for _ in range(500)]
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = rounds(20)
assert keep_freed_memory(64 << 20)
rounds(1)
print(given_back, rounds(20))
"""

COPIES = """
import resource
from forge.runtime.process.allocator import keep_freed_memory
from services.gateway.app import KEPT_BYTES, MAPPED_BYTES
keep_freed_memory(KEPT_BYTES, mapped_bytes=MAPPED_BYTES)
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
def test_kept_memory_causes_no_further_page_faults() -> None:
    """8 MB allocated and freed repeatedly: each page faults once."""
    ended = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=240, check=True
    )
    given_back, kept = map(int, ended.stdout.split())
    assert kept < 0.1 * given_back


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_copies_of_a_prompt_cost_no_page_faults() -> None:
    """Memory freed by one copy is used by the next: a copy of 1 MiB would have 256 page faults
    otherwise."""
    ran = subprocess.run([sys.executable, "-c", COPIES], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 100
