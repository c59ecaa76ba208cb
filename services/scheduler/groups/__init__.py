"""Groups in answers: with their trajectories, by tag, and those that only the pool has."""
