"""The `forge` command: one module for each group of commands."""
