"""Records of groups, their indexes and counters."""
