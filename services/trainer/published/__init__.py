"""Published versions: those in memory, and those that a hold keeps on disk."""
