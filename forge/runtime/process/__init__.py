"""A process: start, serving, end; its memory, clock and child processes."""
