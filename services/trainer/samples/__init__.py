"""From the trajectories of a group to the samples of a batch: returns, advantages, masks."""
