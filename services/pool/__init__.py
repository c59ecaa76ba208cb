"""The durable store of groups, trajectories, turns and rewards: one shard an instance."""
