"""Reads what a pool has stored: groups, trajectories, conversations, token values."""
