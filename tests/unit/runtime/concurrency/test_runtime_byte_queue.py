"""A queue bounded by bytes."""

from __future__ import annotations

import asyncio

from forge.runtime.concurrency.byte_queue import ByteQueue


async def test_a_sender_waits_while_the_queue_is_full() -> None:
    """One item may exceed the bound; taking it makes room."""
    queue = ByteQueue[str](max_bytes=10)
    await queue.until_room()
    queue.put("large", 50)
    waiting = asyncio.create_task(queue.until_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert queue.take() == ["large"]
    await waiting


async def test_a_batch_is_bounded_by_items_and_bytes() -> None:
    """The first item is taken at any size; order stays."""
    queue = ByteQueue[int](max_bytes=100)
    for size_bytes in (9, 1, 2, 3, 4):
        queue.put(size_bytes, size_bytes)
    assert queue.take(max_bytes=3) == [9]
    assert queue.take(max_bytes=3) == [1, 2]
    assert queue.take(max_items=1) == [3]
    assert (queue.take(), queue.take(), len(queue)) == ([4], [], 0)


async def test_a_receiver_waits_for_an_item_or_the_end() -> None:
    """After the end the rest is taken, then nothing."""
    queue = ByteQueue[str](max_bytes=10)
    waiting = asyncio.create_task(queue.until_filled())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.put("a", 1)
    await waiting
    queue.end()
    assert queue.take() == ["a"]
    await queue.until_filled()
    assert queue.take() == []
