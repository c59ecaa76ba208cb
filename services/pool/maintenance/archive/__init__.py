"""Archives of settled groups: written, restored, and released from the shard."""
