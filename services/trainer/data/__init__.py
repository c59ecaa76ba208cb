"""From trajectories of the pool to trainable samples. Imports no other room."""
