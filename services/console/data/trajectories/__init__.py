"""Trajectories: their lists, the page of one, its tokens, and those that just closed."""
