"""Writes that clients ask for: groups and their states, turns, rewards, seals."""
