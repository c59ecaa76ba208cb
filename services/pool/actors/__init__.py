"""The writer: the one actor that changes a shard."""
