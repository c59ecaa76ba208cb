"""All that a term keeps in memory, and the messages about it. No I/O, no clock."""
