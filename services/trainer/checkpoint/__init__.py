"""Checkpoints: the files in one, the history of metrics, and which directories are valid."""
