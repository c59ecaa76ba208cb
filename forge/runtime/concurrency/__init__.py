"""Tasks, pauses, queues and children of asyncio code: nothing here knows a service or a wire."""
