"""`forge.rl.file_broadcast` with small buckets, which stops or does damage as its environment says.

FORGE_TEST_GATE: a file; while it exists the program waits before bucket STOP_AT, and makes a file
with the suffix `.reached`.
FORGE_TEST_DAMAGE: the number of a bucket whose first received byte is changed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from forge.rl import file_broadcast

BUCKET_BYTES = 1 << 16
STOP_AT = 8


def main() -> None:
    """Obey as `file_broadcast` does."""
    gate, damage = os.environ.get("FORGE_TEST_GATE"), os.environ.get("FORGE_TEST_DAMAGE")
    real, begin, count = dist.broadcast, dist.init_process_group, 0

    def init(*arguments: Any, **options: Any) -> None:
        nonlocal count
        count = 0
        begin(*arguments, **options)

    def broadcast(tensor: Any, *, src: int) -> None:
        nonlocal count
        if gate and count == STOP_AT and Path(gate).exists():
            Path(f"{gate}.reached").touch()
            while Path(gate).exists():
                time.sleep(0.01)
        real(tensor, src=src)
        if damage and count == int(damage):
            tensor[0] ^= 1
        count += 1

    file_broadcast.BUCKET_BYTES = BUCKET_BYTES
    dist.init_process_group = init
    dist.broadcast = broadcast  # type: ignore[assignment]
    file_broadcast.main()


if __name__ == "__main__":
    main()
