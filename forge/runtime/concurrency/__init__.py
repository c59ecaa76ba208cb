"""Tasks, pauses and queues of asyncio code: nothing here knows a service or a wire."""
