"""Copies a file in memory from rank 0 of a torch.distributed group to all other ranks.

A program, `python -m forge.rl.file_broadcast SOCKET`, which another process orders over a Unix
socket: a collective with a hung peer cannot be interrupted, and a failed one of NCCL ends its
process, so neither runs beside other work. The process that gives the orders kills it then.

    order   -> the fields of `Order` as JSON, with the descriptor of the file
    answers <- {"ready"} at the start; then {"port"} of rank 0, {"received_bytes"} after each
               bucket, {"ended"}; or {"error"}, and the process ends

Owns the collective. Not here: the members of the group, and the check of what arrives.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

BUCKET_BYTES = 32 << 20
"""Data of one collective, and memory of a GPU for it."""


class Orders:
    """The socket to the process that gives the orders; its end ends this process."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._received: SimpleQueue[tuple[dict[str, Any], int]] = SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()

    def next(self) -> tuple[dict[str, Any], int]:
        """Wait for an order; return it with the descriptor of its file."""
        return self._received.get()

    def answer(self, **answer: Any) -> None:
        """Send an answer."""
        self._socket.send(json.dumps(answer).encode())

    def _receive(self) -> None:
        while True:
            data, files, _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
            if not data:
                os._exit(0)
            self._received.put((json.loads(data), files[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One broadcast."""

    backend: str
    """gloo or nccl."""
    device: str
    """Device of the collective, as torch names it."""
    address: tuple[str, int]
    """Host and port of rank 0's store; rank 0 takes a free port."""
    rank: int
    ranks: int
    size_bytes: int
    """Of the file."""
    limit_s: float
    """Longest time of one collective."""


def broadcast(orders: Orders, file: int, order: Order) -> None:
    """Send the file as rank 0, or receive into it. Raises `RuntimeError` when the group fails."""
    device, size_bytes = torch.device(order.device), order.size_bytes
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    dist.init_process_group(
        order.backend,
        store=_store(orders, order),
        rank=order.rank,
        world_size=order.ranks,
        timeout=timedelta(seconds=order.limit_s),
    )
    # Rank 0 sends from private pages: torch takes no memory that is read-only.
    flags = mmap.MAP_SHARED if order.rank else mmap.MAP_PRIVATE
    data = torch.frombuffer(mmap.mmap(file, size_bytes, flags=flags), dtype=torch.uint8)
    os.close(file)
    # On another device a bucket of its memory takes part in the collective.
    direct = order.device == "cpu"
    room = data if direct else torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device)
    for start in range(0, size_bytes, BUCKET_BYTES):
        part = data[start : start + BUCKET_BYTES]
        moved = part if direct else room[: len(part)]
        if not direct and not order.rank:
            moved.copy_(part)
        dist.broadcast(moved, src=0)
        if not direct and order.rank:
            part.copy_(moved)
        orders.answer(received_bytes=start + len(part))
    # The store of rank 0 ends after the last rank has left it.
    dist.barrier()
    dist.destroy_process_group()
    orders.answer(ended=True)


def _store(orders: Orders, order: Order) -> TCPStore:
    host, port = order.address
    limit = timedelta(seconds=order.limit_s)
    if order.rank:
        return TCPStore(host, port, order.ranks, is_master=False, timeout=limit)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # On this address alone: a listener of TCPStore's own would accept from every network.
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        order.ranks,
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    orders.answer(port=port)
    return store


def main() -> None:
    """Obey until the socket ends, or a broadcast fails."""
    orders = Orders(int(sys.argv[1]))
    orders.answer(ready=True)
    try:
        while True:
            order, file = orders.next()
            broadcast(orders, file, Order(**order))
    except Exception as error:  # its text is the only report of this process
        orders.answer(error=f"{type(error).__name__}: {error}".splitlines()[0])
        # Destructors of a failed group may wait for its peers.
        os._exit(1)


if __name__ == "__main__":
    main()
