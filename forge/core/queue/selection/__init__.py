"""Selection of the training group that may start and of the groups of the next batch, by mode."""
