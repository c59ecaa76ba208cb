"""Answers from the state of a term, for viewers and for the removal of shards."""
