"""`forge pool` and `forge trajectories`: shards, and the trajectories in them."""
