"""Turns trajectories of the pool into trainable samples. Imports no other room of the trainer."""
