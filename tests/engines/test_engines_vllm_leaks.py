"""What is left of a worker that has ended, and of a prompt that has no memory: nothing.

Runs in the environment of `make engine-vllm` alone: `make test-engines`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from errno import EMFILE, ENOMEM
from typing import Any

import pytest
import torch

from forge.core.errors import ResourceExhausted
from services.inference.engines.base import KvSpan
from services.inference.engines.vllm.exchange.kv_format import layout_of, write_blocks
from services.inference.engines.vllm.exchange.names import WORKER_PID
from services.inference.engines.vllm.hand_off import CopyHandOffs
from tests.contract import engines
from tests.contract.engines import GREEDY, make_prompt, prompt_ids

pytestmark = pytest.mark.skipif(not engines.ON_VLLM, reason="runs by `make test-engines`")
_IMPORT = "services.inference.engines.vllm.engine_core.extension"
_WAIT_S = 300.0


def sleeper(code: str = "", **environment: str) -> subprocess.Popen[str]:
    """A process that runs code, says so and sleeps."""
    argv = [
        sys.executable,
        "-c",
        f"{code}\nprint('ready', flush=True)\nimport time\ntime.sleep(9e5)",
    ]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ | environment)


@pytest.mark.parametrize("killed_after_the_import", [True, False])
def test_vllms_process_ends_with_a_worker_that_is_killed_while_it_starts(
    killed_after_the_import: bool,
) -> None:
    """vLLM imports this module before it builds the model, which takes minutes for a large one; the
    worker cannot call it before the end."""
    with sleeper() as worker:
        assert worker.stdout is not None and worker.stdout.readline()
        if not killed_after_the_import:
            worker.kill()
            worker.wait()
        with sleeper(f"import {_IMPORT}", **{WORKER_PID: str(worker.pid)}) as process:
            try:
                assert process.stdout is not None
                assert (process.stdout.readline() == "ready\n") is killed_after_the_import
                worker.kill()
                worker.wait()
                assert process.wait(_WAIT_S) == -signal.SIGKILL
            finally:
                process.kill()


async def test_prompt_without_memory_for_its_keys_gives_its_room_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a file descriptor, or with a full memory: the request moves to another worker."""
    caches = {"layer": torch.randn(8, 4)}
    kind = CopyHandOffs(layout_of(caches), model="m", block_tokens=4, capacity_bytes=1 << 20)
    prompt = make_prompt(prompt_ids(9), GREEDY)
    saving = await kind.save(prompt)
    write_blocks(saving.memory.address, caches, [5, 2])
    data = saving.data(None)
    saving.close()
    span = KvSpan(
        from_token=0, tokens=9, version=1, dtype="uint8", shape=(len(data),), data=data,
        fingerprint=kind.fingerprint,
    )  # fmt: skip

    def failing(error: int) -> Callable[..., int]:
        def fail(*_: Any) -> int:
            raise OSError(error, os.strerror(error))

        return fail

    for name, error in (("memfd_create", EMFILE), ("pwrite", ENOMEM)):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, failing(error))
            with pytest.raises(ResourceExhausted, match="no memory for keys and values"):
                await kind.load(span, prompt)
            if name == "memfd_create":
                with pytest.raises(ResourceExhausted, match="no memory for keys and values"):
                    await kind.save(prompt)
        assert kind._room.used_bytes == 0
    loading = await kind.load(span, prompt)
    assert loading is not None
    loading.close()
