"""Peers of `benchmarks.pool`, in their own environment: Redis streams, TransferQueue.

    .venv-peers/bin/python benchmarks/support/pool/peer.py redis|transferqueue [port]

Reads a JSON object a line, does the work and answers with the seconds it took, client included, as
for Forge. Each record is four columns of int32 or float32, as a turn has them.

- redis: four connections, each with `in_flight` XADDs in one pipeline, read back by XRANGE
- transferqueue: its key-value interface with batches of `in_flight` rows; it keeps them in the
  memory of its storage processes, and nothing of it is on disk
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

COLUMNS = ("prompt_ids", "sampled_ids", "logprobs", "weight_versions")
CONNECTIONS = 4


class Redis:
    """A stream per connection and run."""

    def __init__(self, port: int) -> None:
        import redis.asyncio

        self._clients = [redis.asyncio.Redis(port=port) for _ in range(CONNECTIONS)]
        self._runs = 0

    async def append(self, records: int, column_bytes: int, in_flight: int) -> None:
        self._runs += 1
        value = os.urandom(column_bytes)
        fields = dict.fromkeys(COLUMNS, value)

        async def one(number: int) -> None:
            for begin in range(0, records // CONNECTIONS, in_flight):
                pipeline = self._clients[number].pipeline(transaction=False)
                for _ in range(min(in_flight, records // CONNECTIONS - begin)):
                    pipeline.xadd(f"run:{self._runs}:{number}", fields)
                await pipeline.execute()

        await asyncio.gather(*(one(number) for number in range(CONNECTIONS)))

    async def read(self, records: int, in_flight: int) -> int:
        async def one(number: int) -> int:
            count, after = 0, "-"
            while True:
                found = await self._clients[number].xrange(
                    f"run:{self._runs}:{number}", min=after, count=in_flight
                )
                if not found:
                    return count
                count += len(found)
                after = "(" + found[-1][0].decode()

        return sum(await asyncio.gather(*(one(number) for number in range(CONNECTIONS))))

    async def clear(self) -> None:
        await self._clients[0].flushall()


class TransferQueue:
    """A partition per run."""

    def __init__(self) -> None:
        # A node is given up after 30 s otherwise, which a busy machine may need.
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")
        import ray
        import torch
        import transfer_queue

        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
        transfer_queue.init()
        self._queue, self._torch = transfer_queue, torch
        self._runs = 0
        self._keys: list[str] = []

    async def append(self, records: int, column_bytes: int, in_flight: int) -> None:
        from tensordict import TensorDict

        self._runs += 1
        torch = self._torch
        tokens = column_bytes // 4
        self._keys = [str(number) for number in range(records)]
        for begin in range(0, records, in_flight):
            keys = self._keys[begin : begin + in_flight]
            shape = (len(keys), tokens)
            fields = {
                name: torch.zeros(shape, dtype=torch.float32 if name == "logprobs" else torch.int32)
                for name in COLUMNS
            }
            await self._queue.async_kv_batch_put(
                keys=keys,
                partition_id=f"run{self._runs}",
                fields=TensorDict(fields, batch_size=len(keys)),
            )

    async def read(self, records: int, in_flight: int) -> int:
        count = 0
        for begin in range(0, records, in_flight):
            found = await self._queue.async_kv_batch_get(
                keys=self._keys[begin : begin + in_flight], partition_id=f"run{self._runs}"
            )
            count += int(found.batch_size[0])
        return count

    async def clear(self) -> None:
        await self._queue.async_kv_clear(keys=self._keys, partition_id=f"run{self._runs}")


async def serve(peer: Any) -> None:
    loop = asyncio.get_running_loop()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        request = json.loads(line)
        work = getattr(peer, request.pop("do"))
        started_s = time.perf_counter()
        await work(**request)
        sys.stdout.write(f"{time.perf_counter() - started_s}\n")
        sys.stdout.flush()


def main() -> None:
    # Ray and its children write where answers are expected.
    answers, sys.stdout = sys.stdout, sys.stderr
    peer = Redis(int(sys.argv[2])) if sys.argv[1] == "redis" else TransferQueue()
    sys.stdout = answers
    asyncio.run(serve(peer))


if __name__ == "__main__":
    main()
