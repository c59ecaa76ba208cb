"""Which training group may start, and which groups make the next batch, by mode."""
