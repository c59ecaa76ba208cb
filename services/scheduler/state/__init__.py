"""The state of a term in memory, and the messages of its actors. No I/O, no clock."""
